"""A prediction as text, and as values for JSON."""

from __future__ import annotations

from typing import Any

from tools.planning.hardware import GIB, Cluster
from tools.planning.plan import ENGINE, Placement, Prediction, lacking


def headline(placement: Placement) -> str:
    groups = ", ".join(f"{group.gpus} GPUs {group.name}" for group in placement.groups)
    options = [f"ZeRO {placement.zero_stage}", f"tensor parallel {placement.tensor_parallel} in the engines"]
    options += ["optimizer on the host"] * placement.offload + ["checkpointing"] * placement.checkpointing
    return f"{groups}; {', '.join(options)}"


def text(found: Prediction, cluster: Cluster) -> str:
    """Memory of each group, and seconds where all of them fit."""
    available = cluster.gpu.memory - cluster.reserve
    lines = [headline(found.placement), ""]
    for memory in found.memory:
        state = f"lacks {memory.missing / GIB:.3g} GiB" if memory.missing else "fits"
        lines.append(f"  {memory.group.name}: {memory.needed / GIB:.3g} of {available / GIB:.1f} GiB on each GPU, {state}")
        lines += [f"    {part:<32} {size / GIB:9.3g} GiB" for part, size in memory.parts.items()]
        if ENGINE in memory.group.roles:
            lines.append(f"    {'left for keys and values':<32} {memory.cache / GIB:9.3g} GiB: {found.concurrency:.0f} responses at a time")
        if memory.host:
            lines.append(f"    {'on the host, for each GPU':<32} {memory.host / GIB:9.3g} GiB")
    if found.fits:
        phases = {**found.seconds, "step": found.step}
        lines += ["", *(f"  {phase:<10} {seconds:10.3g} s" for phase, seconds in phases.items())]
    if missing := lacking(found.placement):
        lines += ["", f"  Not in this pipeline yet: {', '.join(missing)}."]
    return "\n".join(lines)


def values(found: Prediction) -> dict[str, Any]:
    """Bytes and seconds."""
    p = found.placement
    return {
        "fits": found.fits,
        "missing": found.missing,
        "seconds": {**found.seconds, "step": found.step},
        "concurrency": found.concurrency,
        "zero_stage": p.zero_stage,
        "offload": p.offload,
        "tensor_parallel": p.tensor_parallel,
        "checkpointing": p.checkpointing,
        "groups": [
            {"gpus": m.group.gpus, "roles": list(m.group.roles), "parts": m.parts, "needed": m.needed, "missing": m.missing, "host": m.host}
            for m in found.memory
        ],
        "lacking": lacking(p),
    }
