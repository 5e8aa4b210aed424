"""The one error of this library: a model that cannot be found, read or served."""

from __future__ import annotations

from common.errors import MillstreamError


class CheckpointError(MillstreamError):
    """The model cannot be loaded."""
