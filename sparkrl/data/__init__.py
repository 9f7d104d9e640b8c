"""Problems: read from disk, rendered through the chat template once, served in a resumable order."""

from __future__ import annotations

from sparkrl.data.problems import LoadedProblems, load_problems
from sparkrl.data.stream import ProblemStream
from sparkrl.data.tokenizer import load_tokenizer

__all__ = ["LoadedProblems", "ProblemStream", "load_problems", "load_tokenizer"]
