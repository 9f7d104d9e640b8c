"""Errors meant for users: what is wrong, what was found, why it matters, what to do.

The command line prints them without a traceback (``--debug`` adds it). ``assert`` stays for our own invariants.
"""

from __future__ import annotations


class SparkrlError(Exception):
    """Base of every error a user can cause and mend.

    Args:
        message: what is wrong and what was found, one or a few lines.
        hint: what to do about it, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"

    def __reduce__(self):  # Ray pickles exceptions; keyword-only arguments would be lost by the default
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(cls: type[SparkrlError], message: str, hint: str | None) -> SparkrlError:
    return cls(message, hint=hint)


class ConfigError(SparkrlError, ValueError):
    """A config key or value is wrong."""


class DataError(SparkrlError, ValueError):
    """A data set, a prompt or a reward is unusable."""


class CheckpointError(SparkrlError, ValueError):
    """A model or adapter checkpoint is incomplete, damaged or of an unknown form."""


class UnknownFamilyError(CheckpointError):
    """A checkpoint is of a model family that is not known here, which says nothing about its health."""


class RoutingError(SparkrlError, ValueError):
    """Routed experts returned by the rollout cannot be replayed."""


class AdapterError(SparkrlError, RuntimeError):
    """An adapter did not attach, or a server answers with another version."""


class AgreementError(SparkrlError, RuntimeError):
    """Trainer and server have been too far apart for too long; training on would follow the distance."""


class VersionError(SparkrlError, RuntimeError):
    """An installed library is not the version a patch was checked with."""


class WorkerError(SparkrlError, RuntimeError):
    """A Ray worker died or did not answer; carries the worker's own message."""
