"""What the wire's version promises: its messages have the forms of the pinned file, and another version is named."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import wire_forms
import zmq
from wire_harness import FAST, PATIENCE, Stage, greeting_router

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.engine_link import EngineLink
from dpi_engine.wire.errors import TypedRefusal
from dpi_engine.wire.messages import WIRE_VERSION, RankState
from dpi_engine.wire.sockets import bound_endpoint, make_socket

# What version 1 said, to the byte.
HELLO_1 = bytes.fromhex(
    "de0008a6737461747573a548454c4c4fa56c6f63616cc2a8686561646c657373c3a776657273696f6e01a3706f64a36f6c64a370696407"
    "ab66696e6765727072696e74a26162a66669656c647381a56d6f64656ca16d"
)
ERROR_1 = bytes.fromhex(
    "83a6737461747573a54552524f52a7686561645f6964c4086865616468656164a56572726f7283a4636f6465b070726f746f636f6c5f76"
    "657273696f6ea76d657373616765d94672616e6b203120737065616b7320776972652076657273696f6e20322c20746865206865616420"
    "313b2072756e206f6e652072656c65617365206f6e20616c6c206e6f646573a764657461696c7382a8657870656374656401a3676f7402"
)
INIT_1 = bytes.fromhex(
    "8ba961646472657373657385a6696e7075747391a86970633a2f2f2f69a76f75747075747391a86970633a2f2f2f6fb1636f6f7264696e"
    "61746f725f696e707574c0b2636f6f7264696e61746f725f6f7574707574c0be66726f6e74656e645f73746174735f7075626c6973685f"
    "61646472657373c0af706172616c6c656c5f636f6e66696780a6737461747573a4494e4954a776657273696f6e01a565706f636801a762"
    "6f6f745f6964c408626f6f74626f6f74a7686561645f6964c4086865616468656164a56c6561736583a462656174cb3fd0000000000000"
    "a773757370656374cb3ff4000000000000a46c6f7374cb4008000000000000a56474797065a46175746fab66696e6765727072696e74a0"
    "a66669656c647380"
)


def test_messages_have_the_forms_that_belong_to_this_version() -> None:
    version, before = wire_forms.pinned()
    changed = wire_forms.differences(before, wire_forms.forms())
    assert not changed, "the wire changed: raise WIRE_VERSION, then `python tests/wire/wire_forms.py`\n" + "\n".join(
        changed
    )
    assert version == WIRE_VERSION, "write the forms of this version: `python tests/wire/wire_forms.py`"


@pytest.mark.parametrize("change", ["a field more", "a field less", "another type", "another order", "a message more"])
def test_each_kind_of_change_is_seen(change: str) -> None:
    before = wire_forms.forms()
    now = {name: list(words) for name, words in before.items()}
    load = now["coordination.LoadReport"]
    if change == "a field more":
        load.append("more: int = 0")
    elif change == "a field less":
        load.pop()
    elif change == "another type":
        load[1] = load[1].replace("int", "float")
    elif change == "another order":
        load[1], load[2] = load[2], load[1]
    else:
        now["coordination.New"] = ["map"]
    assert wire_forms.differences(before, now)
    assert not wire_forms.differences(before, before)


def test_a_changed_form_is_not_written_under_the_same_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "forms.json"
    monkeypatch.setattr(wire_forms, "FILE", file)
    assert wire_forms.main() == 0
    was = file.read_text()
    changed = {**wire_forms.forms(), "sync": ["wave"]}
    monkeypatch.setattr(wire_forms, "forms", lambda: changed)
    assert wire_forms.main() == 1
    assert "raise WIRE_VERSION first" in capsys.readouterr().err
    assert file.read_text() == was
    monkeypatch.setattr(wire_forms, "WIRE_VERSION", WIRE_VERSION + 1)
    assert wire_forms.main() == 0
    assert wire_forms.pinned() == (WIRE_VERSION + 1, changed)


def test_a_rank_of_version_1_is_refused_in_words_that_it_can_read() -> None:
    with Stage("tcp") as stage:
        sock = make_socket(
            stage.context, zmq.DEALER, connect=stage.head.endpoints[0], identity=hs.identity(1, b"bootboot")
        )
        sock.send(HELLO_1)
        assert sock.recv() == b""  # counted and passed over there
        reply = hs.decode_head_message(sock.recv())
        assert isinstance(reply, hs.HeadMessage) and reply.error is not None
        assert reply.error.code == "protocol_version"
        assert f"rank 1 speaks wire version 1, the head {WIRE_VERSION}" in reply.error.message
        assert reply.error.details == {"expected": WIRE_VERSION, "got": 1}
        sock.close(0)
        assert stage.head.info(1).state is RankState.NEW
        stage.up(0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ERROR_1, "rank 1 speaks wire version 2, the head 1; run one release on all nodes"),
        (INIT_1, f"speaks wire version 1, this rank wire version {WIRE_VERSION}"),
    ],
)
def test_a_head_of_another_version_is_named(answer: bytes, words: str) -> None:
    context: zmq.Context[Any] = zmq.Context()
    router = greeting_router(context, "tcp://127.0.0.1:*")
    link = EngineLink(rank=1, endpoint=bound_endpoint(router), local=False, headless=True, timings=FAST)

    def reply() -> None:
        assert router.poll(int(PATIENCE * 1000))
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, answer])

    thread = threading.Thread(target=reply)
    thread.start()
    try:
        with pytest.raises(TypedRefusal, match=words) as caught:
            link.connect(PATIENCE)
        assert caught.value.code == "protocol_version"
    finally:
        thread.join(PATIENCE)
        link.close()
        router.close(0)
        context.destroy(0)
