"""The labels that the guide has SGLang started with are known, and their series are one count."""

from __future__ import annotations

from servoscope.exporters.report import report_of

TEXT = """\
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="false",model_name="m",request_type="chat",tenant="a"} 42
sglang:prompt_tokens_total{is_streaming="true",model_name="m",request_type="",tenant=""} 14
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",shoe_size="9"} 1
"""


def test_tenant_and_request_type_are_no_unknown_labels() -> None:
    found = report_of(TEXT)
    assert found["unknown"] == ["sglang:num_running_reqs{shoe_size}"]
    assert found["signals"]["engine_prompt_tokens_total"]["value"] == 56
    assert found["signals"]["engine_prompt_tokens_total"]["labels"] == {"model_name": "m"}
