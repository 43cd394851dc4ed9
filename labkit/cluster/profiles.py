"""Where labkit's ipyparallel profiles are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from labkit.cluster.errors import ProfileNotFoundError
from labkit.cluster.sessions import private_folder

__all__ = ["profile_folder", "profile_folders"]


def roots() -> list[Path]:
    """Folders that hold ``profile_*`` folders, in the order of the search."""
    here = Path(__file__).resolve()
    # labkit/profiles in an installed wheel, profiles/ beside the package in a checkout.
    shipped = [here.parents[1] / "profiles", here.parents[2] / "profiles"]
    own = [Path(os.environ["IPYTHONDIR"])] if os.environ.get("IPYTHONDIR") else []
    return [root for root in [*shipped, *own] if root.is_dir()]


def profile_folders() -> dict[str, Path]:
    """Every profile that can be started, by name ("local" for ``profile_local``)."""
    found: dict[str, Path] = {}
    for root in roots():
        for folder in sorted(root.glob("profile_*")):
            if (folder / "ipcluster_config.py").is_file():
                found.setdefault(folder.name.removeprefix("profile_"), folder)
    return found


def own_copy(profile: Path) -> Path:
    """A copy of a profile that is installed where this user cannot write; ipyparallel keeps its files in it."""
    copy = private_folder() / "profiles" / profile.name
    copy.mkdir(parents=True, exist_ok=True)
    for file in profile.glob("*.py"):
        shutil.copyfile(file, copy / file.name)
    return copy


def profile_folder(name: str) -> Path:
    """The folder of profile `name`: used in place, or a copy in the user's own folder where that cannot be written to.

    Raises
    ------
    ProfileNotFoundError
        When there is none of that name; the message lists those that are there.
    """
    found = profile_folders()
    if name in found:
        return found[name] if os.access(found[name], os.W_OK) else own_copy(found[name])
    there = ", ".join(found) or "none"
    looked = ", ".join(map(str, roots())) or "no folder at all"
    raise ProfileNotFoundError(
        f"No profile {name!r} (there is: {there}; looked in {looked}).",
        cure=f"labkit.start(profile={next(iter(found), 'local')!r})",
    )
