"""Measuring: steady-state times."""

from jax_ep.bench.clock import Timing as Timing
from jax_ep.bench.clock import compare_runs as compare_runs
