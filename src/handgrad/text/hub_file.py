"""Take the file of a download from the hub: where huggingface_hub is installed and the hub answers, one file instead of many
packages."""

import contextlib
import importlib.util
import os
from pathlib import Path

from .download_table import Download

SECONDS = 3  # for which an answer is awaited


def fetch(item: Download, folder: Path) -> bool:
    """Download the only file of `item` into `folder`, if the hub has it with the expected SHA-256. Returns False if not."""
    if item.hub is None or importlib.util.find_spec("huggingface_hub") is None:
        return False
    (member,) = item.members
    with contextlib.suppress(Exception):  # several libraries' exceptions: whatever is wrong, the packages are left
        import huggingface_hub as hub

        about = hub.get_hf_file_metadata(hub.hf_hub_url(*item.hub), timeout=SECONDS)
        if about.etag == member.sha256:
            file = hub.hf_hub_download(*item.hub, revision=about.commit_hash, local_dir=folder / "hub")
            os.replace(file, folder / member.name)
            return True
    return False
