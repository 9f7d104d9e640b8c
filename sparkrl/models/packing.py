"""Attention over sequences packed into one row, without a mask over the whole row.

A dense mask over T packed tokens costs T squared. Here each sequence becomes one row of a small padded batch just for
the attention product; padding is on the right, so the causal mask alone hides it.

Legend: B sequence, S longest sequence, T packed token, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Boundaries of packed sequences, and the two index maps between packed and padded form."""

    padded_BS: Tensor
    """int64 [B, S], packed index of each padded slot; slots past a sequence's end repeat its last token."""
    packed_T: Tensor
    """int64 [T], flat padded index of each packed token."""

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> PackedRows:
        """Read the boundaries from `position_ids` (int64 [1, T]), which restart at 0 at each sequence."""
        positions = position_ids.reshape(-1)
        is_start = positions == 0
        is_start[0] = True  # a row may begin inside a sequence
        starts = is_start.nonzero()[:, 0]
        ends = torch.cat([starts[1:], starts.new_tensor([positions.numel()])])
        lengths = ends - starts
        longest = int(lengths.max())
        step = torch.arange(longest, device=positions.device)
        padded = starts[:, None] + torch.minimum(step[None], lengths[:, None] - 1)
        row = torch.repeat_interleave(torch.arange(starts.numel(), device=positions.device), lengths)
        packed = row * longest + torch.arange(positions.numel(), device=positions.device) - starts[row]
        return cls(padded, packed)


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
    num_rows, longest = rows.padded_BS.shape
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
