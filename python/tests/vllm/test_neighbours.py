"""Beside another connector, inside vLLM's MultiConnector: vLLM's own ExampleConnector,
which keeps prompts in files and loads them before the forward."""

import pytest
from situations import DOC, document, step_until_loading, warm
from vllm.v1.request import RequestStatus

#: Of DOC: it leaves out the last token and the block of the one before.
THEIRS = 592


@pytest.fixture
def example(tmp_path):
    path = tmp_path / "example"
    path.mkdir()
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(path)},
    }


def test_asked_first_it_loads(make, example):
    e = make(beside=(example,))
    warm(e)
    q = e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576 and e.counts["loads_done"] == 1
    assert len(q.request.output_token_ids) == 4 and not e.counts["errors"]
    # What it has not, the other one brings; it lets go of its lease.
    e.scheduler.reset_prefix_cache()
    e.counts.clear()
    q = e.add(DOC, sampling={"extra_args": {"kv_transfer_params": {"kvtier": {"load": False}}}})
    assert e.step().num_scheduled_tokens == {q.id: len(DOC) - THEIRS}
    e.run()
    assert e.counts["load_tokens"] == 0 and len(q.request.output_token_ids) == 4


def test_asked_second_it_leaves_the_load_to_the_other(make, example):
    e = make(before=(example,))
    warm(e)
    for _ in range(3):
        q = e.add(DOC)
        assert e.step().num_scheduled_tokens == {q.id: len(DOC) - THEIRS}
        e.run()
        assert len(q.request.output_token_ids) == 4
        e.scheduler.reset_prefix_cache()
    assert e.counts["hits"] >= 3, "it was asked and had found it"
    assert e.counts["loads"] == 0 and not e.counts["errors"]
    assert not e.settled(), "the leases of answers that were not chosen have ended"
    # The other has nothing for this one: its prompts must be equal as a whole.
    e.counts.clear()
    e.add(DOC + document(80, 40))
    e.run()
    assert e.counts["load_tokens"] == 576


@pytest.mark.parametrize("outer", ["fail", "recompute"])
def test_policy_of_the_outer_connector_is_told(make, caplog, outer):
    """vLLM's own default ends a request whose load failed, and the outer configuration
    counts: the log says so, and does not say that it was changed."""
    with caplog.at_level("INFO", logger="vllm.kvtier"):
        e = make(multi=True, outer_policy=outer)
    said = [r.getMessage() for r in caplog.records if "kv_load_failure_policy" in r.getMessage()]
    if outer == "recompute":
        assert said == []
        return
    assert len(said) == 1 and 'has kv_load_failure_policy \'fail\', so that a load that fails ends its request' in said[0]
    assert not e.scheduler.recompute_kv_load_failures
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    output.kv_connector_metadata.metadata[0].loads[0].blocks = []
    e.update(output, e.execute(output, todo))
    e.run()
    assert q.request.status == RequestStatus.FINISHED_ERROR


def test_abort_and_reset_beside_another(make, example):
    e = make(beside=(example,))
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    e.abort(q)
    e.update(output, e.execute(output, todo))
    e.run()
    assert e.counts["loads_done"] == 1
    for connector in e.connector.sub_connectors:
        connector.reset_cache()
    e.add(document(81, 600))
    e.run()
    assert e.counts["loads"] == 1 and not e.counts["errors"]
