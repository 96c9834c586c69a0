"""Engines of several ranks: what one topology stored another one loads. vLLM's real
scheduler with decode context parallelism, ranks in processes of their own with real
process groups and connectors, pages filled and compared by vLLM's slot mapping."""

from __future__ import annotations

import pytest
from cluster import Cluster
from situations import document
from topology import HEADS, LATENT, PACKED, SPARSE, Topology


pytestmark = pytest.mark.usefixtures("rank_server")

DOC = document(1, 900)
CHUNK = 64


@pytest.fixture
def live(tmp_path):
    """Engines on one root, one after the other; each ends without anything wrong."""

    def run(kind, topology, **kw):
        extra = {"disk_path": str(tmp_path / "kv"), "disk_gib": 1, "free_floor_gib": 0} | kw.pop("extra", {})
        return Cluster(kind, topology, extra, home=tmp_path, **kw)

    return run


def serve(c: Cluster, n: int, max_new: int = 2) -> dict:
    """One request of the first n tokens of the document; what was loaded for it."""
    before = c.counts["load_tokens"]
    c.add(DOC[:n], max_new)
    c.run()
    assert not c.problems
    assert not c.counts["errors"] and not c.counts["loads_failed"]
    assert not c.settled()  # what was stored is there for the next one
    return c.counts["load_tokens"] - before


# Every life adds a chunk, so that all topologies store and load.
LIVES = {
    "latent": (
        LATENT,
        [
            Topology(4, 4, 1),
            Topology(2, 2, 16),
            Topology(1),
            Topology(4, 2, 4),  # pairs of ranks hold the same rows
            Topology(4, 4, 16),
            Topology(2, 2, 1),
        ],
    ),
    "sparse": (SPARSE, [Topology(4, 4, 4), Topology(2), Topology(2, 2, 8), Topology(1)]),
    "heads": (
        HEADS,
        [Topology(2), Topology(1, layout="LBHNC"), Topology(4, 2, 1), Topology(4), Topology(2, layout="BLNHC")],
    ),
    "packed": (
        PACKED,
        [Topology(2, layout="LBHNC"), Topology(1, layout="LBHNC"), Topology(4, layout="LBHNC"), Topology(4, 2, 16, layout="LBHNC")],
    ),
    # What the ranks fill with one block id is more than a chunk, or no multiple of one.
    "wide": (
        LATENT,
        [Topology(4, 4, 1, block=32), Topology(2, 2, 16, block=48), Topology(4, 4, 64, block=64), Topology(1, block=64), Topology(2, 2, 32, block=32)],
    ),
    "stages": (LATENT, [Topology(2, 2, 1, pp=2), Topology(1), Topology(1, pp=2)]),
}


@pytest.mark.parametrize("name", LIVES)
def test_any_topology_loads_what_another_one_stored(live, name):
    kind, topologies = LIVES[name]
    fingerprints = set()
    for life, topology in enumerate(topologies):
        with live(kind, topology) as c:
            stored = (life + 3) * CHUNK if life else 0
            n = (life + 4) * CHUNK + 5
            loaded = serve(c, n)
            # A hit ends with a whole virtual block.
            assert loaded == stored // c.span * c.span, topology
            assert c.counts["chunks_granted"] == n // CHUNK - stored // CHUNK, topology
            c.forget()
            assert serve(c, n) == n // CHUNK * CHUNK // c.span * c.span, topology
            assert c.counts["loads_done"] == (2 if life else 1) * len(c.ranks), "each rank reports each load once"
            roles = [r.call("state")[0] for r in c.ranks]
            assert roles == ["leader"] + ["member"] * (len(roles) - 1), roles
            fingerprints |= {r.call("fingerprint") for r in c.ranks}
            assert not c.settled(), topology
    assert len(fingerprints) == 1
