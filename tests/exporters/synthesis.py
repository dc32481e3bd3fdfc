"""Expositions of releases that were not run, made from the names in their sources.

``python tests/exporters/synthesis.py`` writes ``synthetic.txt`` beside every ``names.txt`` of
``tests/fixtures/engines``. A line of ``names.txt`` is ``metric [type [labels]]``; a comment at its
top says which labels stand behind S (scheduler) and T (tokenizer). Where no type is given (vLLM's
lists), the type is the one of the running 0.32.0, else the table's, else guessed by the name: good
enough to prove that a NAME is known, and no more.

Numbers are the same everywhere, so that totals can be told: a counter, gauge or histogram counts
3, what names a hit 1, a ratio 0.5. Two replicas and, where the engine has a label for it, two
tensor ranks that tell the same requests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from servoscope.exporters.catalog import metric
from servoscope.exporters.engines import ENGINES, parser_for
from servoscope.exporters.table import Table, parse_version

__all__ = ["COUNT", "FIXTURES", "HITS", "RATIO", "main", "synthesize"]

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engines"
COUNT, HITS, RATIO = 3, 1, 0.5

#: Every value that a label of these takes; others are "x". Priorities are not switched on.
_VALUES: Mapping[str, tuple[str, ...]] = {
    "model_name": ("m",),
    "engine": ("0", "1"),
    "dp_rank": ("0", "1"),
    "tp_rank": ("0", "1"),
    "pp_rank": ("0",),
    "moe_ep_rank": ("0",),
    "engine_type": ("unified",),
    "is_streaming": ("true", "false"),
    "cache_source": ("device", "host", "storage"),
    "finished_reason": ("stop", "length", "abort"),
}
_MODES = {
    "sglang:prefill_effective_tokens_total": ("input", "device_hit", "host_hit", "storage_hit"),
    "sglang:realtime_tokens_total": ("prefill_compute", "prefill_cache", "decode"),
}
_PARTS = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


def synthesize(engine: str, version: str, names: str) -> str:
    """The text that a server of that release would print."""
    table = parser_for(engine, None).table
    sets = _label_sets(names)
    out: list[str] = []
    for row in names.splitlines():
        if row.startswith("#") or not row.strip():
            continue
        name, kind, labels, *_ = *row.split(), "", ""
        kind = kind or _kind(table, name)
        wanted = _labels(engine, version, name, labels, sets)
        if kind == "counter" and not name.endswith("_total"):
            name += "_total"
        out.append(f"# TYPE {name} {kind}")
        for pairs in product(*([(label, v) for v in _values(name, label)] for label in wanted)):
            out += _series(table, name, kind, dict(pairs))
    return "\n".join(out) + "\n"


def _label_sets(names: str) -> dict[str, list[str]]:
    head = names.partition("\n")[0]
    parts = [p.strip().split(" = ") for p in head.split(";")[1:]] if head.startswith("#") else []
    return {name: labels.split(",") for name, labels in parts}


def _labels(
    engine: str, version: str, name: str, labels: str, sets: Mapping[str, list[str]]
) -> list[str]:
    if engine != "vllm":
        return [x for part in labels.split(",") if part for x in sets.get(part, [part])]
    # The label "engine" came with several engine cores behind one server.
    rank = [] if (parse_version(version) or ()) < (0, 9) else ["engine"]
    return ["model_name", *rank, *(["finished_reason"] if "request_success" in name else [])]


def _values(name: str, label: str) -> tuple[str, ...]:
    return _MODES.get(name, ("x",)) if label == "mode" else _VALUES.get(label, ("x",))


def _kind(table: Table, name: str) -> str:
    short = name.partition(":")[2].removesuffix("_total")
    for line in table.lines:
        if line.name == short:
            return line.kind.value
    running = (FIXTURES / "vllm" / "0.32.0" / "metrics.txt").read_text(encoding="utf-8")
    for full in (name, f"{name}_total"):
        _, found, rest = running.partition(f"# TYPE {full} ")
        if found:
            return rest.partition("\n")[0]
    if short.endswith("_seconds"):
        return "histogram"
    return "gauge" if short.endswith(("_info", "_perc", "_blocks", "_state")) else "counter"


def _series(table: Table, name: str, kind: str, labels: dict[str, str]) -> Iterator[str]:
    value = _value(table, name, labels)
    if kind == "gaugehistogram":  # as SGLang writes it: no cumulative buckets
        labels, kind = {**labels, "gt": "0", "le": "+Inf"}, "gauge"
    block = ",".join(f'{n}="{v}"' for n, v in sorted(labels.items()))
    for part in _PARTS.get(kind, ("",)):
        if part == "_bucket":
            yield f'{name}_bucket{{{block}{"," if block else ""}le="0.3"}} 1.0'
            yield f'{name}_bucket{{{block}{"," if block else ""}le="+Inf"}} {float(value)}'
        else:
            yield f"{name}{part}{{{block}}} {float(value)}" if block else f"{name}{part} {value}"


def _value(table: Table, name: str, labels: Mapping[str, str]) -> float:
    short = name.partition(":")[2].removesuffix("_total")
    if "hit" in short or "hit" in labels.get("mode", "") or "cached" in short:
        return HITS
    ratios = {x.name for x in table.lines if metric(x.signal).unit == "ratio"}
    return RATIO if short in ratios else COUNT


def main(root: Path = FIXTURES) -> int:
    """Write every synthetic text."""
    for engine in ENGINES:
        for names in sorted((root / engine).glob("*/names.txt")):
            version = names.parent.name
            text = synthesize(engine, version, names.read_text(encoding="utf-8"))
            (names.parent / "synthetic.txt").write_text(text, encoding="utf-8")
            print(f"{engine} {version}: {text.count(chr(10))} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
