"""What a configuration needs before anything is started: parameters, bytes per GPU, layouts. Imports no torch."""

from __future__ import annotations

from sparkrl.planning.facts import ModelFacts, read_facts
from sparkrl.planning.plan import Plan, make_plan
from sparkrl.planning.render import render

__all__ = ["ModelFacts", "Plan", "make_plan", "read_facts", "render"]
