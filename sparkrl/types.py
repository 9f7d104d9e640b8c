"""What travels between the parts of the loop.

Shape legend: P prompt tokens, T response tokens, L layers that route (sparse layers, in order), K routed slots.
Everything is NumPy or plain Python so that it crosses Ray's object store without copies and without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np


class FinishReason(str, Enum):
    """Why a response ended."""

    STOP = "stop"
    """The model produced an end-of-sequence token."""
    LENGTH = "length"
    """The response budget was used up."""
    ABORT = "abort"
    """The server gave the request up; such a response carries no usable reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row of a data set, rendered through the model's chat template."""

    uid: str
    """Stable identifier, unique in its data set."""
    messages: tuple[dict[str, str], ...]
    """Chat messages, each with `role` and `content`."""
    answer: str
    """Reference answer."""
    data_source: str
    """Name of the data set the row came from, as in DAPO-Math's `data_source`."""
    prompt_ids: np.ndarray
    """int32 [P], the rendered prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How responses are sampled. The defaults draw one from the model's own distribution."""

    num_responses: int = 1
    """Responses a problem."""
    temperature: float = 1.0
    """Of the distribution sampled from and of the log-probs returned; 0 is greedy."""
    top_p: float = 1.0
    """Smallest probability mass that is sampled from; below 1 the log-probs are those of the cut distribution."""
    max_tokens: int
    """Response budget; a response is cut there, or where the context ends, with `FinishReason.LENGTH`."""
    seed: int = 0
    """Same seed, adapter and problems: same tokens and log-probs, bit for bit on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One sampled continuation of a prompt."""

    uid: str
    """`<problem uid>/<index in the group>`."""
    token_ids: np.ndarray
    """int32 [T], the end-of-sequence token included when the model produced one."""
    log_probs: np.ndarray
    """float32 [T], nats, of the sampled tokens at the sampling temperature."""
    routed_experts: np.ndarray
    """uint8 (up to 256 experts) or uint16 [P + T - 1, L, K]; the last token was never fed to the model."""
    policy_version: int
    """Version of the adapter that produced every token of this response."""
    finish_reason: FinishReason
    text: str
    """Decoded response, special tokens left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All responses to one problem."""

    problem: Problem
    responses: tuple[Response, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Verdict on one response."""

    reward: float
    """Reward points, what the advantage is computed from."""
    correct: bool
    """Whether the answer is right; accuracies are means of this, never of `reward`."""
    extracted: str | None
    """The answer that was read out of the response, or None when there was none."""
    parts: dict[str, float] = field(default_factory=dict)
    """What `reward` is the sum of, reward points: `answer`, and `overlong` with overlong shaping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with one score a response, in the same order."""

    group: Group
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One response as the trainer sees it."""

    uid: str
    prompt_ids: np.ndarray
    """int32 [P]."""
    response_ids: np.ndarray
    """int32 [T]."""
    rollout_log_probs: np.ndarray
    """float32 [T], nats."""
    routed_experts: np.ndarray
    """uint8 or uint16 [P + T - 1, L, K]."""
    advantages: np.ndarray
    """float32 [T], unitless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one trainer step consumes; all of it was sampled under `policy_version`."""

    sequences: tuple[TrainSequence, ...]
    policy_version: int
    temperature: float
    """Sampling temperature of the rollout; the trainer divides its logits by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What one trainer step reports."""

    metrics: dict[str, float]
    """Flat metrics, names as in docs/metrics.md (`train/...`, `agree/...`, `perf/...`)."""
    dlogp: np.ndarray
    """float32 [tokens of the batch], trainer minus rollout log-probs, nats, response tokens only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of the LoRA adapter, packed for travel.

    The names and layouts are PEFT's (see `sparkrl.lora.peft_format`): 2D factors for linear layers, and for the fused
    experts `lora_A` [E * R, in] (expert-major rows) and `lora_B` [out, R * E] (rank-major columns).
    """

    version: int
    buffer: np.ndarray
    """uint8 [bytes], every tensor back to back."""
    manifest: tuple[TensorSpec, ...]
    """Where each tensor lies in `buffer`."""
    config: dict[str, Any]
    """Content of PEFT's adapter_config.json."""
    checksum: str
    """xxh3-64 of `buffer`, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor inside an adapter's buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix, for example `float32`."""
    offset: int
    """Bytes from the start of the buffer."""
    first_row: int = 0
    """Where its rows begin in the whole tensor (dimension 0)."""
    num_rows: int | None = None
    """Rows of the whole tensor; None when all of it lies here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Memory of another process on the same machine; see `sparkrl.lora.shared_memory`."""

    pid: int
    fd: int
    """File descriptor in that process."""
    inode: int
    """Tells whether the descriptor still means the same memory."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A GPU's memory in another process on the same machine; see `sparkrl.lora.device_memory`."""

    host: str
    """The machine, by an id of its own."""
    pid: int
    started: int
    """When the process started, in the machine's ticks: its number may be used again."""
    device: str
    """The GPU's own id."""
    handle: str
    """CUDA's, hex."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """What one trainer rank holds of an adapter: rows of every tensor, back to back."""

    manifest: tuple[TensorSpec, ...]
    num_bytes: int
    block_bytes: int
    """Bytes that one checksum covers; the last block may be shorter."""
    checksums: tuple[int, ...]
    """Of each block: xxh3-64, or on a GPU `sparkrl.lora.device_sums`."""
    memory: SharedMemory | DeviceMemory | None
    """Where the bytes lie, on the rank's own machine."""
    buffer: Any = None
    """Instead of `memory`: uint8 [num_bytes], or a reference to it in Ray's object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAdapter:
    """One version of the LoRA adapter in parts that nobody has put together.

    Names are PEFT's. Experts keep the expert in front, `lora_A` [E, R, in] and `lora_B` [E, out, R], as trainer and
    server hold them; `lora_B` is already multiplied by alpha / rank.
    """

    version: int
    config: dict[str, Any]
    """Content of PEFT's adapter_config.json."""
    parts: tuple[AdapterPart, ...]
    """One a trainer rank."""
    checksum: str
    """xxh3-64 of all blocks' checksums, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One scored response of an evaluation as it is written down, without log-probs and routes."""

    problem_uid: str
    index: int
    """Of the response in its group."""
    prompt: str
    """The last message of the problem."""
    response: str
    answer: str
    """Reference answer."""
    extracted: str | None
    """The answer that was read out of the response, or None when there was none."""
    correct: bool
    reward: float
    """Reward points."""
    tokens: int
    """Response length, the end token included."""
    finish_reason: str
    """Value of a `FinishReason`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation: mean@k with an interval."""

    name: str
    step: int
    k: int
    num_problems: int
    mean: float
    """Mean accuracy over problems and samples, 0..1."""
    low: float
    high: float
    """Bounds of the confidence interval, 0..1."""
    pass_at_k: float
    """Fraction of problems with at least one right answer among k."""
    mean_tokens: float
    truncated: float
    """Fraction of responses cut off by the response budget."""
    extra: dict[str, float] = field(default_factory=dict)
