"""A small record beside the files: what the repository holds, and which files were verified here.

With it a directory can be verified without a network, and an interrupted fetch knows what it already checked.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import KimiError
from .model import Listing, RemoteFile

FORMAT = 1


@dataclass
class Manifest:
    """A listing and the paths whose content was seen to match it."""

    listing: Listing
    verified: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every file was verified."""
        return self.verified >= {file.path for file in self.listing.files}

    @classmethod
    def for_listing(cls, listing: Listing, earlier: Manifest | None) -> Manifest:
        """A manifest for `listing` that keeps what `earlier` verified, as far as the digests are the same."""
        if earlier is None:
            return cls(listing)
        known = {file.path: file.digest for file in earlier.listing.files if file.path in earlier.verified}
        return cls(listing, {file.path for file in listing.files if known.get(file.path) == file.digest})

    def save(self, path: Path) -> None:
        """Write atomically."""
        listing = self.listing
        files = [{"path": f.path, "size": f.size, "digest": f.digest, "lfs": f.lfs} for f in listing.files]
        head = {"format": FORMAT, "repo": listing.repo, "revision": listing.revision, "commit": listing.commit}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(head | {"verified": sorted(self.verified), "files": files}, indent=1) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Manifest | None:
        """Read a manifest; None when there is none, KimiError when it is damaged."""
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}")
            files = tuple(RemoteFile(f["path"], int(f["size"]), f["digest"], bool(f["lfs"])) for f in data["files"])
            return cls(Listing(data["repo"], data["revision"], data["commit"], files), set(data["verified"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise KimiError(
                f"damaged manifest: {type(error).__name__}: {error}",
                where=str(path),
                remedy="delete it; with network access `kimi fetch --verify` writes a new one",
            ) from None
