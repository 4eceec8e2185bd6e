"""Loading, replacing and dropping adapters while requests run, over the toy executor."""

from __future__ import annotations

import contextlib

import pytest
from torch import nn

from compilespec import SamplingParams
from compilespec.errors import CheckpointError, EngineClosed, InvalidRequest
from tests.support.adapters import TOY_ADAPTERS, save_toy_adapter, write_adapter
from tests.support.fake_executor import VOCAB, FakeExecutor, engine_over, geometry, toy_decode

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def engine(tmp_path):
    executor = FakeExecutor(geometry(adapters=TOY_ADAPTERS))
    with engine_over(executor) as engine:
        engine.load_adapter("one", save_toy_adapter(tmp_path / "one", 11))
        engine.load_adapter("two", save_toy_adapter(tmp_path / "two", 22))
        yield engine


def asking(name, count=9):
    return SamplingParams(max_new_tokens=count, adapter=name)


def wanted(mark, count=9):
    return toy_decode([*([mark] if mark else []), *PROMPT], count, VOCAB)


def test_each_request_has_its_own(engine):
    outputs = engine.generate([PROMPT] * 4, [asking(n) for n in (None, "two", "one", "two")])
    assert [output.token_ids for output in outputs] == [wanted(mark) for mark in (0, 22, 11, 22)]


def test_one_that_is_replaced_serves_its_requests_to_their_end(engine, tmp_path):
    running = engine.submit(PROMPT, asking("one", 30))
    engine.step()
    new = save_toy_adapter(tmp_path / "new", 33)
    with pytest.raises(InvalidRequest, match="all 2 places for adapters are taken"):
        engine.load_adapter("one", new)
    engine.drop_adapter("two")
    engine.load_adapter("one", new)
    (output,) = engine.generate([PROMPT], asking("one"))
    assert output.token_ids == wanted(33)
    while engine.has_work:
        engine.step()
    assert running.output_token_ids == wanted(11, 30)
    engine.load_adapter("two", new)  # the old place of "one" is free
    assert engine.adapters.names == ("one", "two")


def test_a_dropped_one_is_not_found_again(engine):
    engine.drop_adapter("two")
    with pytest.raises(InvalidRequest, match="no adapter 'two' is loaded; loaded: one"):
        engine.submit(PROMPT, asking("two"))
    with pytest.raises(InvalidRequest, match="no adapter 'two'"):
        engine.drop_adapter("two")
    refused, served = engine.generate([PROMPT, PROMPT], [asking("two"), asking("one")])
    assert (refused.finish_reason, served.token_ids) == ("error", wanted(11))


def test_a_request_keeps_its_adapter_before_it_is_queued(engine, tmp_path):
    """And no longer than there is a request."""
    new = save_toy_adapter(tmp_path / "new", 33)
    request = engine.make_request(PROMPT, asking("two"), 0)
    for name in ("two", "three"):
        with pytest.raises(InvalidRequest, match="all 2 places for adapters are taken"):
            engine.load_adapter(name, new)
        engine.adapters.drop("two") if name == "two" else None
    engine.enqueue(request)
    while engine.has_work:
        engine.step()
    assert request.output_token_ids == wanted(22)
    engine.load_adapter("three", new)
    engine.make_request(PROMPT, asking("three"), 0)  # and gone
    engine.load_adapter("three", save_toy_adapter(tmp_path / "newer", 44))
    (output,) = engine.generate([PROMPT], asking("three"))
    assert output.token_ids == wanted(44)


def test_requests_that_were_accepted_are_served_while_their_adapter_is_loaded_again(
    engine, tmp_path
):
    """Each with the old one or the new one, and none is lost; loads wait, or are refused."""
    marks = {save_toy_adapter(tmp_path / str(mark), mark): mark for mark in (33, 44)}
    with engine.serve() as server:
        engine.adapters.drop("two")
        for turn in range(20):
            busy = server.submit(PROMPT, asking(None, 20))
            tickets = [server.submit(PROMPT, asking("one")) for _ in range(3)]
            with contextlib.suppress(InvalidRequest):
                server.load_adapter("one", list(marks)[turn % 2])
            given = [ticket.result(30) for ticket in tickets]
            assert [output.error for output in (*given, busy.result(30))] == [None] * 4
            assert all(o.token_ids in map(wanted, (11, *marks.values())) for o in given)


def test_a_dropped_place_holds_zeros(engine, tmp_path):
    running = engine.submit(PROMPT, asking("one", 30))
    engine.step()
    places = engine.executor.adapters
    engine.drop_adapter("two")
    engine.drop_adapter("one")  # which a request uses
    assert sorted(places.values()) == [0, 11]
    engine.abort(running)
    engine.load_adapter("three", save_toy_adapter(tmp_path / "new", 33))
    assert sorted(places.values()) == [0, 33]


def test_what_there_is_no_room_for_is_refused(engine, tmp_path):
    with pytest.raises(CheckpointError, match=r"rank 9, and there is room for 8; .*=9"):
        engine.load_adapter("one", save_toy_adapter(tmp_path / "wide", 1, rank=9))
    wild = write_adapter(
        tmp_path / "wild", nn.ModuleDict({"layer": nn.Linear(7, 5)}), ("layer",), lora_alpha=1e300
    )
    with pytest.raises(CheckpointError, match=r"B times its scale of layer .*lower lora_alpha"):
        engine.load_adapter("one", wild)
    assert engine.generate([PROMPT], asking("one"))[0].token_ids == wanted(11)
    other = write_adapter(tmp_path / "other", nn.ModuleDict({"x": nn.Linear(3, 3)}), ("x",))
    with pytest.raises(CheckpointError, match=r"changes x, which the model has not"):
        engine.load_adapter("one", other)
    with pytest.raises(InvalidRequest, match="an adapter's name is a text; got 7"):
        engine.load_adapter(7, save_toy_adapter(tmp_path / "new", 1))
    with pytest.raises(InvalidRequest, match="adapter"):
        SamplingParams(adapter=3)
    with engine_over(FakeExecutor()) as plain:
        with pytest.raises(InvalidRequest, match=r"no room for adapters .*adapters={name"):
            plain.submit(PROMPT, asking("one"))
        with pytest.raises(InvalidRequest, match="no room for adapters"):
            plain.load_adapter("one", tmp_path / "one")


def test_a_served_engine_loads_between_steps(engine, tmp_path):
    with engine.serve() as server:
        ticket = server.submit(PROMPT, asking("one", 40))
        server.drop_adapter("two")
        server.load_adapter("three", save_toy_adapter(tmp_path / "three", 33))
        assert server.submit(PROMPT, asking("three")).result().token_ids == wanted(33)
        assert ticket.result().token_ids == wanted(11, 40)
        assert server.adapter_names() == ("one", "three")
        with pytest.raises(InvalidRequest, match="no adapter 'two'"):
            server.drop_adapter("two")
    with pytest.raises(EngineClosed):
        server.drop_adapter("one")


def test_its_cached_blocks_are_named_by_its_values(engine, tmp_path):
    """Not by the order of loading: what a folder holds is found after a restart."""
    one, two = (engine.adapters.find(name).key for name in ("one", "two"))
    assert one != two
    engine.drop_adapter("one")
    engine.load_adapter("again", save_toy_adapter(tmp_path / "again", 11))
    assert engine.adapters.find("again").key == one
