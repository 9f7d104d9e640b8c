"""The configuration: one dataclass a section, a docstring under each field.

Plain data: this module imports neither torch nor vLLM nor Ray, so `sparkrl --help` and a dry run stay fast. YAML
files in `conf/` state differences from the defaults below. Values are checked once, by `sparkrl.config.rules.check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING


class Precision(Enum):
    """Floating-point type of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Device(Enum):
    """Where servers and trainers run."""

    cpu = "cpu"
    cuda = "cuda"


class Swap(Enum):
    """What a new adapter does to responses that are being sampled."""

    drain = "drain"
    """It waits until they are complete: one adapter slot."""
    in_flight = "in_flight"
    """They are completed under their own version while the new one is loaded beside it: two adapter slots."""


class Transport(Enum):
    """How the adapter gets from trainer to server."""

    auto = "auto"
    """`cuda_ipc` where every server can read what every rank leaves on its GPU, which is tried before the first step;
    otherwise shared memory where Ray has one node, and its object store where it has several."""
    cuda_ipc = "cuda_ipc"
    """A rank leaves its part on its GPU, and the servers' workers on the same machine copy from there (over NVLink or
    PCIe between GPUs). Takes the part's bytes in `rollout.adapter_dtype` on the rank's GPU."""
    shared_memory = "shared_memory"
    """The main memory of one machine."""
    object_store = "object_store"
    """Ray's: the only way between machines."""


COLOCATED_SHARE = 0.5
"""Part of a GPU, by Ray's count, of a server and of a trainer rank that share it."""


class Base(Enum):
    """How the trainer holds the frozen weights of routed experts that the checkpoint quantizes."""

    bf16 = "bf16"
    """Dequantized once, when they are loaded, to `trainer.dtype`."""
    packed = "packed"
    """As stored, and dequantized layer by layer in forward and again in backward: the same numbers in about 3.5 times
    less memory, for some time. What FSDP2 gathers shrinks as much."""


class Compile(Enum):
    """Whether the trainer compiles what lies between a layer's products over experts and its attention product."""

    auto = "auto"
    """On CUDA, for a base of a billion parameters or more, if there is a C compiler. The first step then takes a minute
    or more longer, on a busy host several."""
    always = "always"
    """For small models and on CPU too: the first steps take minutes."""
    never = "never"


class OldLogProbs(Enum):
    """Which log-probs the importance ratio divides by."""

    rollout = "rollout"
    """Those the server returned while sampling: one trainer pass a step, the ratio shows the whole mismatch."""
    trainer = "trainer"
    """The trainer's own, from before the update: the ratio starts at exactly 1. Costs nothing with one mini-batch, as
    its own pass gives them; with several, one more forward pass."""


class Advantage(Enum):
    """Advantage estimator, over the rewards of one prompt's group."""

    grpo = "grpo"
    dr_grpo = "dr_grpo"


class PolicyLoss(Enum):
    """Policy loss, computed by verl."""

    vanilla = "vanilla"
    """Clipped importance ratio per token (PPO, GRPO, DAPO)."""
    gspo = "gspo"
    cispo = "cispo"


class Aggregation(Enum):
    """How token losses become one number."""

    token_mean = "token-mean"
    seq_mean_token_mean = "seq-mean-token-mean"
    seq_mean_token_sum = "seq-mean-token-sum"
    seq_mean_token_sum_norm = "seq-mean-token-sum-norm"
    """As `seq_mean_token_sum`, over the response budget, a constant (Dr. GRPO)."""


class CorrectionWeights(Enum):
    """Weight of a token's loss: the trainer's over the server's probability, truncated."""

    none = "none"
    token = "token"
    """Of the token alone: some bias, little variance."""
    sequence = "sequence"
    """Of the whole response (the product over its tokens): no bias, much variance."""


class Rejection(Enum):
    """What is left out of the loss when its k3 between trainer and server is too large."""

    none = "none"
    token = "token_k3"
    """Tokens."""
    sequence_mean = "seq_mean_k3"
    """Responses, by the mean over their tokens."""
    sequence_sum = "seq_sum_k3"
    """Responses, by the sum over their tokens."""
    sequence_max = "seq_max_k3"
    """Responses, by their worst token."""


class RewardRule(Enum):
    """How a response is scored."""

    math_dapo = "math_dapo"
    """verl's rule for DAPO: the last `Answer:` line against the reference, reward +1 or -1."""
    math_verify = "math_verify"
    """math-verify: the same line, compared as mathematics (fractions, roots, sets, intervals), reward +1 or -1."""


class WandbMode(Enum):
    """Where W&B data goes."""

    auto = "auto"
    """Online with a key, offline without."""
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = MISSING
    """Folder of the checkpoint: config.json, *.safetensors, tokenizer. Relative to the working folder, else to the
    folder that holds `recipes/`."""
    max_tokens: int = 4096
    """Longest prompt plus response, tokens; the server's context length."""
    shape: str | None = None
    """Published shape (`muse_spark_open`) that `sparkrl plan` takes where `path` is not on this machine."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    dtype: Precision = Precision.bfloat16
    """Compute type of the server; NVFP4 experts are dequantized to it where the device has no FP4 kernels."""
    num_replicas: int = 1
    """Servers, each a Ray actor; prompts are spread over them."""
    tensor_parallel_size: int = 1
    """GPUs (or CPU ranks) of one server."""
    max_num_seqs: int = 256
    """Sequences a server decodes at once."""
    max_num_batched_tokens: int = 4096
    """Tokens a server computes in one engine step."""
    kv_cache_gib: float = 1.0
    """Memory for the key-value cache on each GPU of a server (on CPU: of a server), GiB."""
    max_response_tokens: int = 1024
    """Response budget, tokens."""
    temperature: float = 1.0
    """Sampling temperature while training."""
    top_p: float = 1.0
    """Must stay 1 while training: log-probs of a truncated distribution bias the importance ratio."""
    top_k: int = -1
    """Must stay -1 (off) while training, for the same reason."""
    adapter_dtype: Precision = Precision.float32
    """Type that the adapter travels in, and on CPU the type that the server holds it in. A server on CUDA rounds to
    bfloat16 in any case, to the same bits where the checkpoint's gate and up scales are the same."""
    adapter_transport: Transport = Transport.auto
    swap: Swap = Swap.drain
    num_threads: int = 2
    """CPU threads of one server process."""
    start_timeout_s: float = 600.0
    """Longest time a server may take to come up, seconds."""
    request_timeout_s: float = 1800.0
    """Longest time one call for responses may take, seconds."""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    lr: float = 1e-4
    """Learning rate of AdamW. LoRA wants about ten times that of full fine-tuning."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    dtype: Precision = Precision.bfloat16
    """Type the frozen base is held and computed in. The residual stream and the adapter are float32 in either case."""
    base: Base = Base.bf16
    num_workers: int = 1
    """Ranks of the FSDP2 group, each a Ray actor (one GPU each on CUDA)."""
    replay: bool = True
    """Route every token to the experts that the server chose for it."""
    old_log_probs: OldLogProbs = OldLogProbs.rollout
    num_mini_batches: int = 1
    """Optimizer steps per batch; 1 is on-policy."""
    max_tokens_per_micro_batch: int = 8192
    """Tokens of one forward pass of one rank, packed without padding."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    compile: Compile = Compile.auto
    """torch.compile of a layer's parts: the same numbers up to rounding, with the adapter's linear factors rounded to
    `dtype` as on the server. Passes with `lora.dropout` are left as they are."""
    compare_without_replay_every: int = 0
    """Every so many steps, one more forward pass without replay, to show what replay buys; 0 is never."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    num_threads: int = 2
    """CPU threads of one rank."""
    start_timeout_s: float = 1800.0
    """Longest time the group may take to come up, seconds."""
    step_timeout_s: float = 7200.0
    """Longest time one step may take, seconds."""


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    rank: int = 32
    alpha: int = 64
    """Updates are scaled by alpha / rank."""
    rslora: bool = False
    """Scale updates by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    expert_rank: int | None = None
    """Another rank on routed experts, whose updates are then scaled by alpha / expert_rank. `rank` divided by the
    experts a token goes to makes a token's update about as wide as on a dense layer; null means `rank`."""
    dropout: float = 0.0
    """Probability that an input of an A factor is dropped, in the pass that the loss is taken from only."""
    targets: list[str] = field(default_factory=lambda: ["attention", "latent", "experts"])
    """Groups of the model family (`attention`, `latent`, `experts`) or names of modules."""


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Trainer and server differ by numerics alone while routes are replayed: weights are then near 1 and nothing is
    rejected. Without replay both also hide that other experts answered."""

    weights: CorrectionWeights = CorrectionWeights.none
    """Truncated importance sampling (TIS); needs `trainer.old_log_probs=trainer`."""
    max_weight: float = 2.0
    """Larger weights become this."""
    min_weight: float = 0.0
    """Above 0 (IcePop): weights below this, and above `max_weight`, become 0."""
    reject: Rejection = Rejection.none
    max_k3: float = 0.1
    """Largest k3 that is kept, nats. A token whose log-probs are 0.42 apart has 0.1."""


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    advantage: Advantage = Advantage.grpo
    loss: PolicyLoss = PolicyLoss.vanilla
    clip_low: float = 0.2
    """The importance ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.28
    """The importance ratio is clipped above 1 + clip_high (DAPO's clip-higher)."""
    clip_dual: float = 10.0
    """Bound on the loss of a negative advantage (dual clip)."""
    aggregation: Aggregation = Aggregation.token_mean
    kl_coef: float = 0.0
    """Weight of a k3 KL term to the base model in the loss; 0 turns it off."""
    entropy_coef: float = 0.0
    dynamic_sampling: bool = False
    """Sample other prompts in place of those whose responses are all right or all wrong (DAPO)."""
    max_refills: int = 3
    """Dynamic sampling: how often a step may sample other prompts; then it trains on the mixed groups it has."""
    overlong_filtering: bool = False
    """Leave responses that were cut off by the budget out of the loss; they still count in their group's mean."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    rule: RewardRule = RewardRule.math_dapo
    num_workers: int = 1
    """Ray workers that score responses."""
    timeout_s: float = 10.0
    """Longest time one response may take to score, seconds; past it the response counts as wrong."""
    overlong_buffer: float = 0.0
    """Soft overlong punishment (DAPO takes 0.2): the last tokens of the response budget, this share of it, cost reward,
    more with every token; 0 turns it off. Accuracy is not touched."""
    overlong_penalty: float = 1.0
    """Reward points that a response of full budget loses."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    path: str = MISSING
    """Parquet or JSON-lines file in DAPO-Math's schema."""
    max_prompt_tokens: int = 2048
    """Longer prompts are left out and counted."""
    shuffle: bool = True
    """New order every epoch, drawn from the run's seed."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    name: str = "heldout"
    path: str | None = None
    """Parquet or JSON-lines file of the evaluation problems; None turns evaluation off."""
    k: int = 8
    """Responses a problem."""
    num_problems: int | None = None
    """Take the first so many problems; None takes all."""
    every: int = 10
    """Steps between evaluations; one is always made before the first step and after the last."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_response_tokens: int | None = None
    """None: the rollout's response budget."""
    confidence: float = 0.95
    problems_at_once: int | None = None
    """Problems of one call to the servers; their answers are saved together. None: two batches of every server."""
    resume: str | None = None
    """Folder of an interrupted `sparkrl eval`; the problems it answered are not asked again."""


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    num_steps: int = 100
    num_prompts: int = 32
    """Prompts a step."""
    group_size: int = 8
    """Responses a prompt."""
    save_every: int = 10
    """Steps between checkpoints; the last step, an interrupt and a step that is followed by an evaluation save too."""
    keep_checkpoints: int = 3
    """Older checkpoints are removed; 0 keeps all."""
    resume: str | None = None
    """Run folder to go on from its newest checkpoint."""
    k3_patience: int = 0
    """Save and stop after so many steps in a row with a k3 above `telemetry.k3_limit`; 0 only warns."""


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    wandb: WandbMode = WandbMode.auto
    wandb_timeout_s: float = 30.0
    """Longest time a W&B server that does not answer may hold up the start of a run, and its end, seconds."""
    project: str = "sparkrl"
    tensorboard: bool = False
    """Write the same figures for TensorBoard, into `<run>/tensorboard`."""
    num_samples: int = 4
    """Sample responses written down a step."""
    k3_limit: float = 1e-2
    """A k3 above this is reported as a warning, and as an alert of W&B."""


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    device: Device = Device.cpu
    address: str | None = None
    """Address of a running Ray cluster (`auto`, `ray://host:port`); None starts Ray on this machine."""
    num_gpus: int = 0
    """GPUs the run takes in all: servers plus trainers, or either when they are colocated."""
    colocate: bool = False
    """Put a server and a trainer rank on each GPU. Both stay loaded: the server's share is its weights, adapter slots
    and `rollout.kv_cache_gib`, the trainer takes the rest."""
    gpu_memory_gb: float = 0.0
    """Memory of one GPU as it is sold, GB of 10^9 bytes; 0 is unknown. Used by `sparkrl plan` alone."""
    object_store_gib: float = 0.5
    """Size of the object store when Ray is started here, GiB."""


@dataclass(kw_only=True, slots=True)
class Config:
    """The whole configuration of one run."""

    recipe_name: str = MISSING
    """Set by the recipe; names the run folder."""
    seed: int = 0
    output_dir: str = "runs"
    run_dir: str | None = None
    """Exact run folder; None makes `<output_dir>/<recipe>/<time>-<seed>`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
