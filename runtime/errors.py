"""The errors that draftgraph raises for a caller's mistake; each names the value and what is accepted."""

from __future__ import annotations


class DraftgraphError(ValueError):
    """The base of the errors that are meant to be read by a user: one line, no traceback needed."""


class ConfigError(DraftgraphError):
    """An engine or speculation option that is unknown, malformed or contradicts another."""


class RequestError(DraftgraphError):
    """A prompt or sampling parameter that the engine cannot serve."""


class ModelNotFoundError(DraftgraphError):
    """A model name that is neither a directory, a GGUF file, an alias, nor an id known to the hub."""


class NotAvailableError(DraftgraphError):
    """A method or option of the field that draftgraph knows, and that this version does not have."""


class FetchError(DraftgraphError):
    """A model that could not be brought to this machine: no network, no room, a broken or altered file."""
