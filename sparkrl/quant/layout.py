"""From the tensors of a checkpoint's files to the model's own: quantized weights with their scales, experts stacked.

Whatever the form on disk, a model sees `...experts.gate_up_proj` [E, 2I, H] with the gate rows first,
`...experts.down_proj` [E, H, I], and `M.weight` of linear modules. (gpt-oss keeps its own: both transposed, gate and up
columns alternating.) What does not fit is collected, not raised, so that a whole checkpoint can be judged at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparkrl.quant.form import FORMS, KNOWN_SCHEMES, Names, Scheme, expert_shape, is_ignored
from sparkrl.quant.shards import Stored

_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_SINGLE = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_PARTS = {"gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_PARTS |= {"w3": ("gate_up_proj", 1), "down_proj": ("down_proj", 0), "w2": ("down_proj", 0)}

GPT_OSS = "gpt_oss"
"""The `model_type` whose own layout is kept."""
_OTHER_FORM = "the checkpoint is incomplete, or config.json declares another form"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a checkpoint."""

    problem: str
    """What, and what was found."""
    tensor: str | None = None
    file: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Matrix:
    """One stored weight: plain, or codes with their scales."""

    name: str
    """Stored name of the weight or its codes."""
    shape: tuple[int, ...]
    """Dequantized."""
    names: Names | None = None
    """How it is quantized; None if plain."""

    @property
    def block(self) -> str:
        """Stored name of the block scales."""
        assert self.names
        return self.name.removesuffix(self.names.codes) + self.names.block

    @property
    def scale(self) -> str | None:
        """Stored name of the scale over the whole weight."""
        assert self.names
        return self.name.removesuffix(self.names.codes) + self.names.scale if self.names.scale else None


@dataclass(frozen=True, slots=True)
class Logical:
    """One tensor as the model sees it."""

    name: str
    shape: tuple[int, ...]
    experts: tuple[tuple[Matrix, ...], ...]
    """Stacked here from one tuple of matrices an expert (their rows follow each other); or just ((matrix,),)."""
    per_expert: bool = False
    alternate: bool = False
    """Rows of gate and up alternate on disk, and are put in order."""
    transposed: bool = False
    """The model holds the last two dimensions swapped."""

    @property
    def first(self) -> Matrix:
        """A matrix to ask for form and type."""
        return self.experts[0][0]


def arrange(
    stored: Mapping[str, Stored], scheme: Scheme | None, config: Mapping[str, Any]
) -> tuple[dict[str, Logical], list[Finding]]:
    """Group the stored tensors.

    Args:
        stored: every tensor of the files.
        scheme: what config.json declares.
        config: the text model's fields.
    Returns:
        Logical tensors by name, sorted; and what is wrong, worst last.
    """
    findings: list[Finding] = []
    matrices = list(_matrices(stored, scheme, findings))
    logical: dict[str, Logical] = {}
    stacks: dict[str, dict[int, dict[int, Matrix]]] = {}
    for name, matrix in matrices:
        if found := _SINGLE.match(name):
            part, half = _PARTS[found[3]]
            expert = stacks.setdefault(f"{found[1]}.{part}", {}).setdefault(int(found[2]), {})
            if half in expert:
                findings.append(_twice(expert[half], matrix, stored))
            expert[half] = matrix
        else:
            if name in logical:
                findings.append(_twice(logical[name].first, matrix, stored))
            alternate = bool(matrix.names and matrix.names.alternate)
            transposed = alternate and config.get("model_type") == GPT_OSS
            shape = (*matrix.shape[:-2], *matrix.shape[:-3:-1]) if transposed else matrix.shape
            alternate = alternate and not transposed and name.endswith("gate_up_proj")
            logical[name] = Logical(name, shape, ((matrix,),), alternate=alternate, transposed=transposed)
    for name, experts in stacks.items():
        if name in logical:
            first = experts[min(experts)]
            findings.append(_twice(logical[name].first, first[min(first)], stored))
        elif stack := _stack(name, experts, stored, findings):
            logical[name] = stack
    for tensor in logical.values():
        findings += _check_experts(tensor, stored, scheme, config)
    return dict(sorted(logical.items())), findings


def companions(name: str, stored: Mapping[str, Stored], names: Names) -> list[str]:
    """Stored names of everything that belongs to the codes `name`, themselves left out."""
    base = name.removesuffix(names.codes)
    endings = (names.block, *([names.scale] if names.scale else []), *names.extras)
    return [base + ending for ending in endings if base + ending in stored]


def _matrices(
    stored: Mapping[str, Stored], scheme: Scheme | None, findings: list[Finding]
) -> Iterator[tuple[str, Matrix]]:
    """Logical name and matrix of everything that is not a scale."""
    forms = [FORMS[form] for form in (scheme.forms if scheme else FORMS)]
    taken: set[str] = set()
    codes: dict[str, Names] = {}
    for name in sorted(stored):
        for names in forms:
            if name.endswith(names.codes) and name.removesuffix(names.codes) + names.block in stored:
                codes[name] = names
                taken.update(companions(name, stored, names))
                break
    for name, tensor in sorted(stored.items()):
        if name in taken:
            continue
        quantized = codes.get(name)
        problem = hint = None
        if quantized and scheme is None:
            problem = f"`{name}` in {tensor.file} is quantized, but config.json has no `quantization_config`"
            hint = f"supported: {KNOWN_SCHEMES}"
        elif quantized:
            problem = _check_matrix(name, quantized, stored)
            hint = f"the form is that of {scheme.title}" if scheme else None
        elif any(_is_scale(name, ending) for form in forms for ending in (form.block, form.scale) if ending):
            problem = f"`{name}` in {tensor.file} scales a tensor that is absent"
            hint = _OTHER_FORM
        elif tensor.dtype == torch.uint8:
            block = next((name.removesuffix(n.codes) + n.block for n in forms if name.endswith(n.codes)), "its scale")
            problem = f"`{name}` in {tensor.file} holds packed codes, but `{block}` is absent"
            hint = _OTHER_FORM
        if problem:
            findings.append(Finding(problem, name, tensor.file, hint))
        elif quantized:
            base, shape = name.removesuffix(quantized.codes), _code_shape(tensor)
            yield base + quantized.logical, Matrix(name, (*shape[:-1], 2 * shape[-1]), quantized)
        else:
            yield name, Matrix(name, tensor.shape)


def _twice(one: Matrix, other: Matrix, stored: Mapping[str, Stored]) -> Finding:
    file = stored[other.name].file
    problem = f"`{one.name}` in {stored[one.name].file} and `{other.name}` in {file} are the same weight"
    return Finding(problem, other.name, file, "two forms of one weight may differ; remove the one that is not meant")


def _is_scale(name: str, ending: str) -> bool:
    # Router scales and the like are named alike; those of a weight stand on a weight's name.
    return name.endswith(ending) and (ending.startswith(".weight") or bool(_STACKED.search(name.removesuffix(ending))))


def _code_shape(stored: Stored) -> tuple[int, ...]:
    """Shape of the codes with the blocks' own dimension (gpt-oss) folded into the columns."""
    *rows, groups, width = stored.shape
    return (*rows, groups * width) if len(stored.shape) == 4 else stored.shape


def _check_matrix(name: str, names: Names, stored: Mapping[str, Stored]) -> str | None:
    """What is wrong with codes and scales of one weight, or None."""
    codes, base = stored[name], name.removesuffix(names.codes)
    shape = _code_shape(codes)
    if codes.dtype != torch.uint8 or len(shape) not in (2, 3) or shape[-1] * 2 % names.block_size:
        return (
            f"`{name}` in {codes.file} must be uint8 [experts, rows, columns / 2] or [rows, columns / 2] with columns "
            f"a multiple of {names.block_size}, got: {_short(codes.dtype)} {codes.shape}"
        )
    *rows, half = shape
    block_types = (torch.float8_e4m3fn,) if names.scale else (torch.uint8, torch.float8_e8m0fnu)
    wanted: list[tuple[str, tuple[torch.dtype, ...], list[tuple[int, ...]]]] = [
        (names.block, block_types, [(*rows, 2 * half // names.block_size)])
    ]
    if names.scale:
        single: list[tuple[int, ...]] = [(), (1,)]
        wanted.append((names.scale, (torch.float32,), single if len(rows) == 1 else [(rows[0],), (rows[0], 2)]))
    for ending, dtypes, shapes in wanted:
        scale = stored.get(base + ending)
        if scale is None:
            return f"`{base}{ending}` is absent, though `{name}` in {codes.file} is quantized"
        if scale.dtype not in dtypes or scale.shape not in shapes:
            return (
                f"`{base}{ending}` in {scale.file} must be {' or '.join(map(_short, dtypes))} "
                f"{' or '.join(map(str, shapes))}, got: {_short(scale.dtype)} {scale.shape}"
            )
    if names.scale and len(stored[base + names.scale].shape) == 2 and rows[1] % 2:
        return f"`{name}` in {codes.file} has {rows[1]} rows, which gate and up cannot share"
    return None


def _stack(
    name: str, experts: dict[int, dict[int, Matrix]], stored: Mapping[str, Stored], findings: list[Finding]
) -> Logical | None:
    """The stacked tensor of per-expert ones, if they are all there and alike."""
    parts = 2 if name.endswith("gate_up_proj") else 1
    example = next(iter(experts[min(experts)].values()))
    file = stored[example.name].file
    for index in range(max(experts) + 1):
        if len(experts.get(index, {})) != parts:
            findings.append(Finding(f"expert {index} of `{name}` is absent or lacks a part", name, file))
            return None
    form = (example.shape, example.names, stored[example.name].dtype)
    for matrix in (matrix for index in sorted(experts) for matrix in experts[index].values()):
        if (matrix.shape, matrix.names, stored[matrix.name].dtype) != form or len(matrix.shape) != 2:
            found = f"{_short(stored[matrix.name].dtype)} {matrix.shape}"
            problem = f"`{matrix.name}` is {found}, `{example.name}` is {_short(form[2])} {example.shape}"
            findings.append(Finding(problem, matrix.name, stored[matrix.name].file, "experts must be alike"))
            return None
    rows, width = example.shape
    ordered = tuple(tuple(experts[index][half] for half in range(parts)) for index in range(len(experts)))
    return Logical(name, (len(experts), parts * rows, width), ordered, per_expert=True)


def _check_experts(
    tensor: Logical, stored: Mapping[str, Stored], scheme: Scheme | None, config: Mapping[str, Any]
) -> Iterator[Finding]:
    """Routed experts against what config.json says about their size and form."""
    found = _STACKED.search(tensor.name)
    if not found:
        return
    first = tensor.first
    file = stored[first.name].file
    wanted = expert_shape(dict(config), found[1])
    if wanted and config.get("model_type") == GPT_OSS and not tensor.per_expert:
        wanted = (wanted[0], wanted[2], wanted[1])
    if wanted and tensor.shape != wanted:
        problem = f"`{tensor.name}` in {file} has shape {tensor.shape}, config.json says {wanted}"
        yield Finding(problem, tensor.name, file, "config.json may belong to another model")
    if scheme and not first.names and not is_ignored(first.name, scheme.ignore):
        kind = _short(stored[first.name].dtype)
        problem = f"`{first.name}` in {file} is {kind}, but config.json declares {scheme.title} for it"
        yield Finding(problem, tensor.name, file, "list its module as ignored in the config, or quantize it")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
