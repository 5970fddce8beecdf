"""Secrets in what a run writes."""

from megatron_wrap.hidden_secrets import hide_secrets, remember_secrets, without_secrets


def test_secrets_of_the_configuration_and_the_environment_are_hidden(monkeypatch):
    monkeypatch.setenv("SERVICE_PASSWORD", "correct horse")
    key = "-----BEGIN PRIVATE KEY-----\nQ2hlY2tpbmcgYSBrZXk\n-----END PRIVATE KEY-----"
    flow = {"judge_api_key": "abcd-efgh", "eos_token": "<|im_end|>", "beta": 0.1, "keys": [{"password": "x"}]}
    values = {"flow": flow}
    hidden = without_secrets({**values, "url": "https://me:pass@host/x", "note": key})
    assert hidden["flow"] == {**flow, "judge_api_key": "[hidden]"}
    assert (hidden["url"], hidden["note"]) == ("https://[hidden]@host/x", "[hidden]")
    remember_secrets(values)
    text = "401 for abcd-efgh and correct horse, loss per token: 5.25, eyJhbGciOiJI.abcdefghij.klmnopqrst"
    assert hide_secrets(text) == "401 for [hidden] and [hidden], loss per token: 5.25, [hidden]"
