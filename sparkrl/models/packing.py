"""Attention over sequences packed into one row, without a mask over the whole row.

A dense mask over T packed tokens costs T squared. On CUDA the kernel takes the sequences' boundaries. Elsewhere each
sequence becomes one row of a small padded batch just for the attention product; padding is on the right, so the causal
mask alone hides it.

Legend: B sequence, S longest sequence, T packed token, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PackedRows:
    """Boundaries of packed sequences, and the two index maps between packed and padded form."""

    starts_B: Tensor
    """int64 [B], packed index of each sequence's first token."""
    num_tokens: int
    longest: int
    """Tokens of the longest sequence."""

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> PackedRows:
        """Read the boundaries from `position_ids` (int64 [1, T]), which restart at 0 at each sequence."""
        positions = position_ids.reshape(-1)
        is_start = positions == 0
        is_start[0] = True  # a row may begin inside a sequence
        starts = is_start.nonzero()[:, 0]
        num_tokens = positions.numel()
        return cls(starts, num_tokens, int(starts.diff(append=starts.new_tensor([num_tokens])).max()))

    @cached_property
    def bounds(self) -> Tensor:
        """int32 [B + 1], first tokens and the number of tokens, as the kernel wants them."""
        return F.pad(self.starts_B, (0, 1), value=self.num_tokens).int()

    @cached_property
    def padded_BS(self) -> Tensor:
        """int64 [B, S], packed index of each padded slot; slots past a sequence's end repeat its last token."""
        step = torch.arange(self.longest, device=self.starts_B.device)
        return self.starts_B[:, None] + torch.minimum(step[None], self._lengths_B[:, None] - 1)

    @cached_property
    def packed_T(self) -> Tensor:
        """int64 [T], flat padded index of each packed token."""
        device = self.starts_B.device
        sequence = torch.arange(len(self.starts_B), device=device)
        row_T = torch.repeat_interleave(sequence, self._lengths_B, output_size=self.num_tokens)
        return row_T * self.longest + torch.arange(self.num_tokens, device=device) - self.starts_B[row_T]

    @property
    def _lengths_B(self) -> Tensor:
        return self.starts_B.diff(append=self.starts_B.new_tensor([self.num_tokens]))


def packed_attention(
    q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, rows: PackedRows, *, scale: float, window: int | None
) -> Tensor:
    """Causal attention inside each packed sequence.

    Args:
        q_1HTD: [1, H, T, D]; `k_1HTD` and `v_1HTD` may have fewer heads (grouped queries).
        window: positions a token sees, itself included; None sees all before it.
    Returns:
        [1, T, H, D].
    """
    if _has_kernel(q_1HTD):
        q, k, v = (t[0].transpose(0, 1) for t in (q_1HTD, k_1HTD, v_1HTD))
        left = -1 if window is None or window >= rows.longest else window - 1
        ends = (rows.bounds, rows.bounds, rows.longest, rows.longest)
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, *ends, 0.0, True, False, scale=scale, window_size_left=left, window_size_right=0
        )[0]
        return out.unsqueeze(0)
    num_rows, longest = len(rows.starts_B), rows.longest
    if num_rows == 1:
        q, k, v = q_1HTD, k_1HTD, v_1HTD
    else:
        q, k, v = (t[0].transpose(0, 1)[rows.padded_BS].transpose(1, 2) for t in (q_1HTD, k_1HTD, v_1HTD))
    dtype = q.dtype
    if q.device.type == "cpu":
        # torch's bfloat16 attention on CPU takes six times as long in backward as its float32 one
        q, k, v = q.float(), k.float(), v.float()
    grouped = q.shape[1] != k.shape[1]
    if window is None or window >= longest:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        step = torch.arange(longest, device=q.device)
        distance = step[:, None] - step[None]
        seen = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)
    out = out.to(dtype).transpose(1, 2).flatten(0, 1)
    return (out if num_rows == 1 else out[rows.packed_T]).unsqueeze(0)


def _has_kernel(q: Tensor) -> bool:
    # what the flash kernel takes
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
