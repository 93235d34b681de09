"""Whole models: decoders of published families, from and to the files that the hub keeps them in."""

from jax_ep.models.checkpoint import from_pretrained, save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]
