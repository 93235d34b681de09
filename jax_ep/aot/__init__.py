"""Reading programs ahead of time: what a lowered or compiled text says it will do."""

from jax_ep.aot.compiled import COLLECTIVES as COLLECTIVES
from jax_ep.aot.compiled import CollectiveCount as CollectiveCount
from jax_ep.aot.compiled import count_collectives as count_collectives
from jax_ep.aot.compiled import host_calls as host_calls
