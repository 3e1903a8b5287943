"""The environment of nodes without network: what Hugging Face's libraries must be told, with the reason. Pure."""

from __future__ import annotations

from allranks.envpolicy import EnvVar


def offline_variables(hf_home: str | None = None, datasets_cache: str | None = None) -> list[EnvVar]:
    """Variables of a node that must not ask the network.

    Args:
        hf_home: a folder on the node that stands for the user's cache; None leaves HF_HOME alone.
        datasets_cache: a folder with prepared data sets of the hub that was staged.
    """
    found = [
        ("HF_HUB_OFFLINE", "1", "a node without network would retry each request to the hub until it times out"),
        ("TRANSFORMERS_OFFLINE", "1", "the same for transformers before 4.42, which do not all read HF_HUB_OFFLINE"),
        ("HF_DATASETS_OFFLINE", "1", "the same for datasets before 2.20"),
        ("HF_HUB_DISABLE_TELEMETRY", "1", "no reports to the hub from ranks"),
    ]
    if hf_home is not None:
        found.append(("HF_HOME", hf_home, "the user's cache is not on this node; this folder of the job is"))
    if datasets_cache is not None:
        found.append(("HF_DATASETS_CACHE", datasets_cache, "the data set was staged here, at its pinned revision"))
    return [EnvVar(name=name, value=value, reason=reason, source="stage") for name, value, reason in found]
