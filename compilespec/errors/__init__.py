"""Every error that compilespec raises on purpose.  One base class, messages that name the cure.

A message says what was expected, what was given, where, and what to try.  It fits on one line,
because the command line prints it unchanged and exits with code 2.
"""

from __future__ import annotations


class SpecError(Exception):
    """Base class of all errors raised by compilespec."""

    def __str__(self) -> str:  # KeyError subclasses would print the repr of the message
        return str(self.args[0]) if self.args else ""


class UnknownMethod(SpecError, KeyError):
    """`spec=` names no known drafting method."""


class InvalidOption(SpecError, ValueError):
    """A keyword of `compile()` or a config is unknown, or its value is impossible."""


class NotSupported(SpecError):
    """The request is understood, but the feature that would serve it is not built."""


class ModelNotFound(SpecError):
    """The target given by a path or a name cannot be found or loaded."""


class DraftNotFound(SpecError):
    """No drafter was given and none was found; the message lists what was searched."""


class DraftMismatch(SpecError):
    """The drafter does not fit the target (hidden size, vocabulary, number of layers)."""


class CheckpointError(SpecError):
    """A checkpoint is damaged, or its tensors are missing, unexpected, misshapen or mistyped."""


class TraceError(SpecError):
    """The model cannot be captured as one graph; names the module, source line and cause."""


class NoPositionInput(TraceError):
    """A plain module takes no `position_ids` and computes no `arange` over its tokens."""


class UnsupportedModel(TraceError):
    """The target is not a causal language model of text alone: a later token changes an earlier
    one's logits, not every token has logits, or it reads more than one sequence of tokens.
    """


class UnsupportedState(SpecError):
    """The target keeps recurrent state, which cannot be rewound after a rejected draft."""


class PassError(SpecError):
    """A pass did not match as many places as it must, or broke its stage's contract."""


class ShapeMismatch(SpecError, ValueError):
    """Tensors do not have the shapes that an operator or a program input requires."""


class InvalidRequest(SpecError, ValueError):
    """A prompt or its sampling parameters cannot be served; other requests are unaffected."""


class ContextExceeded(InvalidRequest):
    """A prompt and its new tokens are more than the engine has room for."""


class DraftFailed(SpecError):
    """A drafting function on the host raised or gave no drafts; ends the request that called it."""


class GuideFailed(SpecError):
    """A guide could not be followed to its end; ends the request it belongs to."""


class ProcessorFailed(SpecError):
    """A logits processor on the host raised or gave no logits; ends the request it belongs to."""


class MissingDependency(SpecError):
    """An optional dependency, the C++ compiler or Python's headers are not installed; the message
    has the command that installs them.
    """


class TokenizerFailed(SpecError):
    """The tokenizer raised while it decoded a request's tokens; ends that request."""


class NanLogits(SpecError):
    """The model's logits for a request contain NaN; ends that request, others continue."""


class StaleGraphInput(SpecError):
    """A tensor that a captured graph reads was replaced; the graph knows only its old address."""


class TrainingDiverged(SpecError):
    """The loss of a trained drafter became NaN or infinite; the last state is kept."""


class RankLost(SpecError):
    """Another process of a tensor-parallel job ended; so does this one."""


class RanksDiffer(SpecError):
    """The processes of a tensor-parallel job do not have the same code, model and options."""


class EngineClosed(SpecError):
    """The engine was closed, or takes no more requests; compile a new one."""


class QueueFull(SpecError):
    """The queue is full; the request was not queued, and may be tried again."""


def is_integer(value: object) -> bool:
    """True where an option's value is an integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)
