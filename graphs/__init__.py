"""Capture, buckets, the program algebra and its executors. Nothing outside this folder touches a graph API."""

from .buckets import batch_buckets, bucket_for, exact_widths, prefill_widths, verify_widths
from .compile import compile_region, eager_region
from .executors import Executor, ExecutorStatus, available_executors, choose_executor
from .host_executor import HostExecutor
from .mailbox import Delivery, Mailbox
from .program import Node, Program, Sequence, Step, Switch, While, map_steps
from .state import DecodeState, StateShape

__all__ = [
    "DecodeState",
    "Delivery",
    "Executor",
    "ExecutorStatus",
    "HostExecutor",
    "Mailbox",
    "Node",
    "Program",
    "Sequence",
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
    "verify_widths",
]
