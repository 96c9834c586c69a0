"""The statistics that an engine core sends to its front end."""

import time

from situations import document


class Sink:
    """Takes what vLLM sends from the engine core to its loggers."""

    def __init__(self, e):
        self.sent = []
        make_stats = e.scheduler.make_stats

        def spy(*args, **kw):
            stats = make_stats(*args, **kw)
            if stats is not None and stats.kv_connector_stats:
                self.sent.append(stats.kv_connector_stats)
            return stats

        e.scheduler.make_stats = spy

    def until(self, e, name, limit_s=60):
        """Steps the engine with small requests until a figure was sent."""
        end = time.monotonic() + limit_s
        while not any(_plain(d).get(name) for d in self.sent):
            assert time.monotonic() < end, f"{name} never comes: {self.sent}"
            e.add(document(5, 20), 1)
            e.run()


def _plain(data):
    return data.get("KVTierConnector", data)
