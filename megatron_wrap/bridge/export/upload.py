"""Upload of a Hugging Face folder to the hub."""

from __future__ import annotations

from pathlib import Path

from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import on_rank_0


def upload(folder: Path, repo_id: str, private: bool | None, commit_message: str) -> str:
    """Upload a folder to the Hugging Face hub from global rank 0; returns the commit's URL on every rank. Collective.

    Raises:
        CheckpointError: on every rank, if the upload fails.
    """

    def push() -> str:
        from huggingface_hub import HfApi

        api = HfApi()
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message)
        except Exception as error:  # the hub, the network and the login raise different exceptions
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise CheckpointError(
                f"{folder} could not be uploaded to {repo_id}: {reason}; the folder is complete and can be uploaded "
                "later"
            ) from error
        return str(commit.commit_url)

    return on_rank_0(push)
