"""Whole models from and to folders as the hub has them: config.json beside safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path

from jax.sharding import Mesh

from jax_ep.config import CommConfig, refuse
from jax_ep.models import safetensors_io as files
from jax_ep.models.decoder import Decoder
from jax_ep.models.families import config_from_hub, config_to_hub, family_of
from jax_ep.models.loading import Read, load_params
from jax_ep.models.saving import MOST_FILE_BYTES, save_params

__all__ = ["MOST_FILE_BYTES", "Read", "from_pretrained", "load_params", "save_params", "save_pretrained"]

CONFIG = "config.json"
_CONFIG_LIMIT = 10_000_000  # bytes


def from_pretrained(
    folder: str | os.PathLike[str],
    mesh: Mesh | None = None,
    comm: CommConfig | None = None,
    dtype: str | None = None,
) -> Decoder:
    """A published model, straight to each device's shard.

    Args:
      folder: with config.json and model.safetensors, or the files of model.safetensors.index.json. Nothing is fetched.
      mesh: with the layer's axes, as `make_mesh` gives; None: one device.
      comm: how tokens reach their experts; None: CommConfig().
      dtype: of parameters and computation, "float32", "bfloat16" or "float16", into which the files' tensors are
        converted. None: as config.json says, or the files where it says nothing; all tensors have to be of it.

    Returns:
      A Decoder, whose `family` is the model's.

    Raises:
      ConfigError: a config.json or a file that is not what it should be, see `config_from_hub` and `load_params`;
        nothing is loaded then.
    """
    hub = files.read_json(Path(folder), CONFIG, _CONFIG_LIMIT)
    family = family_of(hub)
    known = dtype
    if known is None and hub.get("torch_dtype") is None and hub.get("dtype") is None:
        known = _stored_dtype(Path(folder))
    config = config_from_hub(hub, comm=comm, dtype=known)
    decoder = Decoder(config, mesh, params=load_params(folder, config, family, mesh, dtype))
    decoder.family = family
    return decoder


def _stored_dtype(folder: Path) -> str | None:
    """The dtype of a checkpoint's tensors by name; None where it is none of parameters, which loading then says."""
    with files.open_checkpoint(folder) as checkpoint:
        found = next((files.dtype_of(checkpoint.tensor(name).dtype) for name in checkpoint.files), None)
    return None if found is None else found.name


def save_pretrained(
    decoder: Decoder,
    folder: str | os.PathLike[str],
    family: str | None = None,
    *,
    most_file_bytes: int = MOST_FILE_BYTES,
) -> None:
    """A decoder as a folder that `from_pretrained` and the hub's tools read: config.json and its safetensors files.

    All of it is written or nothing, see `save_params`; other files of the folder (a tokenizer) stay.

    Args:
      decoder: whose parameters are of config.moe.param_dtype. Every process of a job calls this.
      folder: made where missing.
      family: whose names the tensors get, a key of `families.FAMILIES`; None: the decoder's, if it came from files.
      most_file_bytes: of tensors in one file.

    Raises:
      ConfigError: a family that cannot express the model, a full disk, a folder that cannot be written to.
    """
    family = getattr(decoder, "family", None) if family is None else family
    if family is None:
        refuse("family", None, "this decoder came from no files, so the family has to be said", "mixtral")
    config = (json.dumps(config_to_hub(decoder.config, family), indent=2, sort_keys=True) + "\n").encode()
    beside = {CONFIG: config}
    save_params(decoder.params(), decoder.config, family, folder, most_file_bytes=most_file_bytes, beside=beside)
