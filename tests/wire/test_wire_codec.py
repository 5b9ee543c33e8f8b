"""Frames equal vLLM's in the vllm dialect, round trips in both, and typed errors for what is malformed."""

from __future__ import annotations

import struct

import golden_frames as golden
import msgspec
import pytest

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.codec import (
    DEAD,
    MAX_FRAMES,
    StartWave,
    UtilityCall,
    decode_outputs,
    decode_ready_response,
    decode_request,
    encode,
    encode_outputs,
    encode_ready_response,
    encode_request,
    utility_reply,
    utility_value,
)
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import (
    DEAD_SENTINEL,
    Dialect,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventType,
    FinishReason,
    LoadRecord,
    LogprobsLists,
    OutputKind,
    PrefillStats,
    ReadyResponse,
    RequestType,
    SamplingParams,
    SchedulerStats,
)

VLLM = Dialect.VLLM
EVERY_DIALECT = pytest.mark.parametrize("dialect", list(Dialect))
ROWS = LogprobsLists([[5, 7], [9, 11]], [[-0.5, -1.0], [-0.25, -2.0]], [1, 2])
WIDE = LogprobsLists(
    [list(range(r * 22, r * 22 + 22)) for r in range(3)],
    [[-i / 8 for i in range(r * 22, r * 22 + 22)] for r in range(3)],
    [1, 2, 3],
)


def head(hexadecimal: str) -> bytes:
    return bytes.fromhex(hexadecimal)


# ------------------------------------------------------------------------------------------------ golden bytes


@pytest.mark.parametrize(
    ("local", "headless", "tail"), [(False, True, "c2a8686561646c657373c3"), (False, False, "c2a8686561646c657373c2")]
)
def test_hello_and_ready_equal_those_of_a_vllm_engine(local: bool, headless: bool, tail: str) -> None:
    for status, word in ((hs.HELLO, "48454c4c4f"), (hs.READY, "5245414459")):
        frame = head("83a6737461747573a5" + word + "a56c6f63616c" + tail)
        message = hs.EngineMessage(
            status=status, local=local, headless=headless, version=1, epoch=3, pod="p", fields={"a": 1}, steps=9
        )
        assert hs.encode_engine_message(message, VLLM) == frame
        decoded = hs.decode_engine_message(frame)
        assert (decoded.status, decoded.local, decoded.headless, decoded.version) == (status, local, headless, 0)


def test_ready_of_a_moe_engine_carries_the_hash_as_fourth_key() -> None:
    message = hs.EngineMessage(status=hs.READY, local=False, headless=True, parallel_config_hash="ab" * 32)
    frame = hs.encode_engine_message(message, VLLM)
    assert len(frame) == 118 and frame[:1] == b"\x84" and b"\xb4parallel_config_hash\xd9\x40abab" in frame


def test_the_init_message_equals_that_of_a_vllm_head() -> None:
    decoded = hs.decode_head_message(golden.INIT_DENSE)
    assert isinstance(decoded, hs.InitMessage)
    assert decoded.addresses.inputs == ["tcp://127.0.0.1:33601"]
    assert decoded.addresses.coordinator_output == "tcp://127.0.0.1:38585"
    assert (decoded.version, decoded.parallel_config) == (0, {})
    decoded.epoch, decoded.version, decoded.dtype = 4, 1, "bfloat16"
    assert hs.encode_init(decoded, VLLM) == golden.INIT_DENSE


def test_identities_of_both_lengths() -> None:
    assert hs.identity(1) == b"\x01\x00" and hs.parse_identity(b"\x01\x00") == (1, b"")
    assert hs.parse_identity(hs.identity(258, b"12345678")) == (258, b"12345678")
    for bad in (b"", b"\x01", b"\x00\x01\x02\x03\x04", b"x" * 255):
        with pytest.raises(WireError):
            hs.parse_identity(bad)


def test_the_ready_response_equals_a_captured_one() -> None:
    response = decode_ready_response(golden.READY_RESPONSE)
    assert response is not None and response.max_model_len == 512 and response.dtype == "bfloat16"
    response.epoch = 5
    assert encode_ready_response(response, VLLM) == golden.READY_RESPONSE
    assert decode_ready_response(encode_ready_response(response)) == response


def test_longer_and_empty_ready_responses_are_taken() -> None:
    response = decode_ready_response(golden.READY_RESPONSE_25_KEYS)
    assert response is not None and (response.num_gpu_blocks, response.data_parallel_rank) == (16384, 1)
    assert decode_ready_response(b"") is None


def test_a_captured_add_is_decoded_and_unknown_sampling_keys_are_passed_over() -> None:
    kind, request = decode_request([b"\x00", golden.ADD])
    assert kind is RequestType.ADD and isinstance(request, EngineCoreRequest)
    assert request.request_id == "cmpl-b5abcf17ae9a400f-0-b7811fa0"
    assert request.external_req_id == "cmpl-b5abcf17ae9a400f-0"
    assert (request.prompt_token_ids, request.epoch, request.output_token_ids) == ([971, 779], 0, [])
    sampling = request.sampling_params
    assert sampling is not None and b"watermarking" in golden.ADD
    assert (sampling.temperature, sampling.max_tokens, sampling.output_kind) == (0.0, 4, OutputKind.FINAL_ONLY)
    assert (sampling.stop, sampling.bad_words, sampling.eos_token_id, sampling.all_stop_token_ids) == ([], [], 0, [0])


def test_our_add_has_vllms_22_fields_in_its_order() -> None:
    _, request = decode_request([b"\x00", golden.ADD])
    assert isinstance(request, EngineCoreRequest)
    request.output_token_ids, request.epoch = [1], 3
    kind, payload = encode_request(RequestType.ADD, request, VLLM)
    theirs, ours = msgspec.msgpack.decode(golden.ADD), msgspec.msgpack.decode(payload)
    assert kind == b"\x00" and payload[:3] == golden.ADD[:3] == b"\xdc\x00\x16"
    assert [v for i, v in enumerate(ours) if i != 3] == [v for i, v in enumerate(theirs) if i != 3]
    assert ours[3].items() <= theirs[3].items()  # defaults are left out


def test_utility_calls_and_answers_equal_captured_ones() -> None:
    kind, call = decode_request([b"\x03", golden.UTILITY_CALL])
    assert kind is RequestType.UTILITY
    assert call == UtilityCall(0, 8758208494039405041, "reset_mm_cache", [])
    assert encode_request(RequestType.UTILITY, call, VLLM) == [b"\x03", golden.UTILITY_CALL]
    reply = head("990190c0cb40a12e8fd8bb428c93ce0f57d451c092c0c2c0c0c0c0")
    outputs = decode_outputs([reply])
    assert isinstance(outputs, EngineCoreOutputs) and outputs.utility_output == utility_reply(257414225, False)
    assert utility_value(outputs.utility_output) is False
    assert encode_outputs(outputs, VLLM) == [reply]


@pytest.mark.parametrize(
    ("frame", "message"),
    [("9200c4020000", StartWave(0, b"\x00\x00")), ("9200c0", StartWave(0, None)), ("920101", StartWave(1, 1))],
)
def test_start_wave_frames_equal_captured_ones(frame: str, message: StartWave) -> None:
    assert decode_request([b"\x02", head(frame)]) == (RequestType.START_DP_WAVE, message)
    assert encode_request(RequestType.START_DP_WAVE, message, VLLM) == [b"\x02", head(frame)]


def test_a_load_report_has_the_form_of_a_captured_one() -> None:
    stats = SchedulerStats()
    frame = encode_outputs(EngineCoreOutputs(1, scheduler_stats=stats, timestamp=2203.854290133), VLLM)[0]
    start = "990190de0012b06e756d5f72756e6e696e675f7265717300b06e756d5f77616974696e675f7265717300b86e756d5f73"
    assert len(frame) == 496 and frame.startswith(head(start))


def test_an_output_has_the_form_of_a_captured_one() -> None:
    output = EngineCoreOutput("while-paused", [593], finish_reason=FinishReason.LENGTH)
    frame = encode_outputs(EngineCoreOutputs(1, [output], SchedulerStats()), VLLM)[0]
    start = "990191dc0012ac7768696c652d70617573656491cd0251c0c0c001c0c0c0c0c0c0c000c0c0c0c0de0012b06e756d5f72"
    assert frame.startswith(head(start))


def test_wave_messages_equal_captured_ones() -> None:
    complete = encode_outputs(EngineCoreOutputs(0, timestamp=1.0, wave_complete=0), VLLM)[0]
    start = encode_outputs(EngineCoreOutputs(1, timestamp=1.0, start_wave=1), VLLM)[0]
    stamp = "cb" + struct.pack(">d", 1.0).hex()
    assert complete == head("990090c0" + stamp + "c0c000c0c0")
    assert start == head("990190c0" + stamp + "c0c0c001c0")


def test_log_probabilities_equal_those_of_vllms_encoder() -> None:
    frames = [golden.LOGPROBS_PAYLOAD, golden.LOGPROBS_IDS, golden.LOGPROBS_VALUES]
    outputs = decode_outputs(frames)
    assert isinstance(outputs, EngineCoreOutputs)
    output = outputs.outputs[0]
    assert (output.new_logprobs, output.new_prompt_logprobs_tensors) == (ROWS, WIDE)
    assert output.events == [EngineCoreEvent(EventType.QUEUED, 2.0)]
    assert encode_outputs(outputs, VLLM) == frames


def test_the_dead_sentinel() -> None:
    assert decode_outputs([DEAD_SENTINEL]) is DEAD
    assert decode_outputs([memoryview(DEAD_SENTINEL)]) is DEAD


# ----------------------------------------------------------------------------------------------- round trips


@EVERY_DIALECT
def test_outputs_survive_the_wire(dialect: Dialect) -> None:
    output = EngineCoreOutput(
        "r",
        [1, 2],
        new_logprobs=ROWS,
        new_prompt_logprobs_tensors=LogprobsLists([], [], []),
        finish_reason=FinishReason.STOP,
        stop_reason="word",
        prefill_stats=PrefillStats(num_prompt_tokens=5),
    )
    sent = EngineCoreOutputs(3, [output, EngineCoreOutput("s", [4])], timestamp=2.0, finished_requests=["r"])
    if dialect is Dialect.DPI:
        output.output_index, sent.epoch, sent.load = 7, 2, LoadRecord(3, 2, 1, 4, 5, 0.5)
    assert decode_outputs(encode_outputs(sent, dialect)) == sent


@EVERY_DIALECT
def test_requests_survive_the_wire(dialect: Dialect) -> None:
    request = EngineCoreRequest("r", [1], sampling_params=SamplingParams(seed=3, logit_bias={5: 1.5}), client_index=1)
    if dialect is Dialect.DPI:
        request.output_token_ids, request.epoch = [9, 8], 4
    assert decode_request(encode_request(RequestType.ADD, request, dialect)) == (RequestType.ADD, request)
    assert decode_request(encode_request(RequestType.ABORT, ["a", "b"], dialect)) == (RequestType.ABORT, ["a", "b"])


def test_the_vllm_dialect_leaves_our_fields_out() -> None:
    sent = EngineCoreOutputs(0, [EngineCoreOutput("r", [1], output_index=3, error="no")], epoch=4)
    raw = msgspec.msgpack.decode(encode_outputs(sent, VLLM)[0])
    assert (len(raw), len(raw[1][0])) == (9, 18)
    raw = msgspec.msgpack.decode(encode_outputs(sent)[0])
    assert (len(raw), len(raw[1][0])) == (12, 20)


def test_arrays_of_another_length_are_taken() -> None:
    short = decode_outputs([encode([2, [["r", [5]]]])])
    assert isinstance(short, EngineCoreOutputs) and short.outputs[0].new_token_ids == [5]
    fields = [*msgspec.to_builtins(EngineCoreOutputs(2)), "something", {"new": 1}]
    assert decode_outputs([encode(fields)]) == EngineCoreOutputs(2)
    _, request = decode_request([b"\x00", encode(["r", [1], None, {}])])
    assert isinstance(request, EngineCoreRequest) and request.sampling_params == SamplingParams()


# ------------------------------------------------------------------------------------------------- refusals


def add(**changes: object) -> list[bytes]:
    request = EngineCoreRequest("r", [1], sampling_params=SamplingParams())
    for name, value in changes.items():
        setattr(request, name, value)
    return encode_request(RequestType.ADD, request)


PICKLE = msgspec.msgpack.Ext(1, b"cos\nsystem\n")

BAD_REQUESTS = {
    "no payload": ([b"\x00"], "frame_count", None),
    "no frames": ([], "frame_count", None),
    "too many frames": ([b"\x00", golden.ADD, *[b""] * MAX_FRAMES], "frame_count", None),
    "unknown type": ([b"\x07", b"\x90"], "unknown_type", None),
    "internal type": ([b"\x05", b"\x90"], "unknown_type", None),
    "empty type": ([b"", b"\x90"], "unknown_type", None),
    "not msgpack": ([b"\x00", b"\xc1\xc1"], "malformed", None),
    "deep nesting": ([b"\x00", b"\x93\xa1r\x91\x01" + b"\x91" * 100_000], "malformed", None),
    "huge length": ([b"\x00", b"\xdd\xff\xff\xff\xff"], "malformed", None),
    "pickle": (add(kv_hints=PICKLE), "malformed", "r"),
    "pictures": (add(mm_features=[{"data": 1}]), "unsupported_field", "r"),
    "pooling": (add(pooling_params={"task": "embed"}), "unsupported_field", "r"),
    "adapter": (add(lora_request={"name": "x"}), "unsupported_field", "r"),
    "embeddings": (add(prompt_embeds=["float32", [1], msgspec.msgpack.Ext(3, b"\0\0\0\0")]), "unsupported_field", "r"),
    "no prompt": (add(prompt_token_ids=None), "unsupported_field", "r"),
    "no sampling": (add(sampling_params=None), "unsupported_field", "r"),
    "tokens as text": (add(prompt_token_ids="abc"), "malformed", "r"),
    "sampling of a wrong type": (add(sampling_params={"temperature": "hot"}), "malformed", "r"),
    "abort of a number": ([b"\x01", b"\x07"], "malformed", None),
    "wave without number": ([b"\x02", b"\x90"], "malformed", None),
    "call without method": ([b"\x03", b"\x92\x00\x01"], "malformed", None),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_a_typed_error(case: str) -> None:
    frames, code, request_id = BAD_REQUESTS[case]
    with pytest.raises(WireError) as caught:
        decode_request(frames)
    assert (caught.value.code, caught.value.request_id) == (code, request_id)


def logprob_frames(array: object, *aux: bytes) -> list[bytes]:
    good = ["<i4", [1, 1], msgspec.msgpack.Ext(3, b"\0\0\0\0")]
    return [encode([0, [["r", [1], [array, ["<f4", *good[1:]], ["<i4", [1], good[2]], None]]]]), *aux]


BAD_ARRAYS = {
    "index of no frame": ["<i4", [1, 1], 1],
    "index of the payload": ["<i4", [1, 1], 0],
    "negative index": ["<i4", [1, 1], -1],
    "unknown dtype": ["|O", [1, 1], msgspec.msgpack.Ext(3, b"\0\0\0\0")],
    "too few bytes": ["<i4", [1, 2], msgspec.msgpack.Ext(3, b"\0\0\0\0")],
    "huge shape": ["<i4", [1 << 40, 1 << 40], msgspec.msgpack.Ext(3, b"")],
    "negative shape": ["<i4", [-1, -1], msgspec.msgpack.Ext(3, b"\0\0\0\0")],
    "shape that is none": ["<i4", "ab", msgspec.msgpack.Ext(3, b"\0\0\0\0")],
    "other rows than the rest": ["<i4", [1], msgspec.msgpack.Ext(3, b"\0\0\0\0")],
    "pickled data": ["<i4", [1, 1], msgspec.msgpack.Ext(1, b"\0\0\0\0")],
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_a_bad_array_of_log_probabilities_is_a_typed_error(case: str) -> None:
    assert decode_outputs(logprob_frames(["<i4", [1, 1], msgspec.msgpack.Ext(3, b"\0\0\0\0")]))
    with pytest.raises(WireError) as caught:
        decode_outputs(logprob_frames(BAD_ARRAYS[case]))
    assert caught.value.code == "malformed"


@pytest.mark.parametrize("result", [[["builtins", "int"], 1], [None], "x", {"a": 1}])
def test_utility_results_with_type_names_are_refused(result: object) -> None:
    reply = utility_reply(1, None)
    reply.result = result
    with pytest.raises(WireError):
        utility_value(reply)


BAD_HANDSHAKES = {
    "not msgpack": b"\xc1",
    "a list": b"\x90",
    "no status": encode({"local": True, "headless": False}),
    "unknown status": encode({"status": "BYE", "local": True, "headless": False}),
    "no local": encode({"status": "HELLO", "headless": False}),
    "no headless": encode({"status": "READY", "local": True}),
    "local of a wrong type": encode({"status": "HELLO", "local": "yes", "headless": False}),
    "epoch beyond the limit": encode({"status": "HELLO", "local": True, "headless": False, "epoch": 1 << 60}),
    "negative epoch": encode({"status": "BEAT", "epoch": -1}),
    "short boot id": encode({"status": "HELLO", "local": True, "headless": False, "replaces": b"abc"}),
}


@pytest.mark.parametrize("case", BAD_HANDSHAKES)
def test_a_bad_handshake_message_is_a_typed_error(case: str) -> None:
    with pytest.raises(WireError):
        hs.decode_engine_message(BAD_HANDSHAKES[case])


@pytest.mark.parametrize("frame", [b"", b"\x80", encode({"status": "ERROR"}), encode({"status": "HELLO"}), b"\x93"])
def test_a_bad_message_of_a_head_is_a_typed_error(frame: bytes) -> None:
    with pytest.raises(WireError):
        hs.decode_head_message(frame)


def test_a_full_ready_response_survives_the_wire() -> None:
    response = ReadyResponse(max_model_len=1, num_gpu_blocks=2, block_size=3, dp_stats_address=None, epoch=9)
    assert decode_ready_response(encode_ready_response(response)) == response
