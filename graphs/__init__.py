"""Capture, buckets, the program algebra and its executors. Nothing outside this folder touches a graph API."""

from .buckets import batch_buckets, bucket_for, exact_widths, prefill_widths, verify_widths
from .capture import CaptureReport
from .capture_guard import CaptureError
from .compile import compile_region, eager_region
from .driver.protocol import GraphError
from .executors import Executor, ExecutorStatus, available_executors, choose_executor, select_executor
from .host_executor import HostExecutor
from .host_memory import HostReader, SharedTensor, shared, upload
from .mailbox import Delivery, Mailbox
from .program import Node, Program, Sequence, Step, Switch, While, map_steps
from .state import DecodeState, HostView, StateShape

__all__ = [
    "CaptureError",
    "CaptureReport",
    "DecodeState",
    "Delivery",
    "Executor",
    "ExecutorStatus",
    "GraphError",
    "HostExecutor",
    "HostReader",
    "HostView",
    "Mailbox",
    "Node",
    "Program",
    "Sequence",
    "SharedTensor",
    "StateShape",
    "Step",
    "Switch",
    "While",
    "available_executors",
    "batch_buckets",
    "bucket_for",
    "choose_executor",
    "compile_region",
    "eager_region",
    "exact_widths",
    "map_steps",
    "prefill_widths",
    "select_executor",
    "shared",
    "upload",
    "verify_widths",
]
