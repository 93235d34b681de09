"""What compare.py --sweep runs: packed's options, each changed alone, away from the config's own packed layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

from _bench import Bench
from _common import chosen
from jax_ep.config import CommConfig, ConfigError, MoEConfig
from jax_ep.layer import resolve_transport

BASELINE, TOGETHER = "baseline", "together"
# Of every field the values that are tried, less the baseline's own. On CPU, all_gather is what ragged crosses by.
VALUES: dict[str, tuple[Any, ...]] = {
    "dedup": (False, True),
    "num_chunks": (1, 2, 4),
    "recv_rows_factor": (1.0, 1.25, None),
    "wire_dtype": (None, "int8", "float8_e4m3fn"),
    "messages": ("rank", "expert"),
    "transport": ("all_to_all", "ragged"),
}
_SAVINGS: dict[str, Any] = {"dedup": True, "recv_rows_factor": 1.25, "wire_dtype": "int8"}

HELP = (
    "packed's own options instead of modes, comma-separated, each changed alone: "
    + "; ".join(f"{field} ({', '.join(map(str, values))})" for field, values in VALUES.items())
    + "; and as the last row, where two or more of them are swept, the savings together: "
    + ", ".join(f"{field}={value}" for field, value in _SAVINGS.items())
)


def swept_fields(text: str) -> list[str]:
    """The fields that "dedup,num_chunks" names."""
    return chosen("sweep", text, VALUES, "field", "sweep: no variants of")


def variants(base: MoEConfig, fields: list[str], mesh: Mesh | None) -> tuple[dict[str, MoEConfig], dict[str, str]]:
    """The layers to run, the baseline first; and those that the config refuses beside the baseline, with its reason."""
    own = {field: getattr(base.comm, field) for field in fields}
    if own.get("transport") == "auto":
        own["transport"] = resolve_transport(base, mesh)
    changes = {f"{field}={value}": {field: value} for field in fields for value in VALUES[field] if value != own[field]}
    together = {field: value for field, value in _SAVINGS.items() if field in fields and _saves(field, own[field])}
    if len(together) > 1:
        changes[TOGETHER] = together
    layers, refused = {BASELINE: base}, {}
    for name, change in changes.items():
        try:
            layers[name] = dataclasses.replace(base, comm=dataclasses.replace(base.comm, **change))
        except ConfigError as error:
            refused[name] = str(error)
    return layers, refused


def _saves(field: str, own: Any) -> bool:
    """Whether the baseline's own value leaves something to save."""
    return not own if field != "recv_rows_factor" else own is None or own > _SAVINGS[field]


def sweep_record(bench: Bench, fields: list[str], source: str, config_name: str) -> dict[str, Any]:
    """Compiles and times the variants, and tells everything that sweep.json holds."""
    layers, refused = variants(bench.config, fields, bench.mesh)
    programs = bench.compile(layers)
    programs.pop("dense")  # only for the differences
    timings = bench.time(programs)
    described: dict[str, dict[str, Any]] = {}
    for name, program in programs.items():
        figures = bench.describe(program, timings[name])
        base = described.get(BASELINE, figures)
        described[name] = figures | {
            "time_ratio": figures["median_ms"] / base["median_ms"],
            "wire_ratio": figures["bytes"]["wire"] / base["bytes"]["wire"] if base["bytes"]["wire"] else None,
            "changed": changed(bench.config.comm, program.config.comm),
            "comm": dataclasses.asdict(program.config.comm),
        }
    return {
        **bench.setting(source, config_name),
        "swept": fields,
        "variants": described,
        "refused": refused,
        "reference_bytes": bench.ledger(bench.config)["reference"],
        "notes": [
            *bench.notes(programs, list(programs), "variants"),
            *(f"{name} is refused and not run: {reason}" for name, reason in refused.items()),
        ],
    }


def changed(base: CommConfig, comm: CommConfig) -> dict[str, Any]:
    """The fields of `comm` that are not as in `base`."""
    after = dataclasses.asdict(comm)
    return {field: after[field] for field, value in dataclasses.asdict(base).items() if after[field] != value}
