"""What may change when a run is resumed: what every step takes anew. Anything else would be another run."""

from typing import Any

from fastp3o.config import RunConfig
from fastp3o.training.states.fingerprints import FUNCTION
from fastp3o.training.states.manifest import Manifest


class ResumeError(ValueError):
    """A run cannot go on from its state with the configuration, data or models that it is given."""


def require_same_run(manifest: Manifest, config: RunConfig, fingerprints: dict[str, str], processes: int) -> list[str]:
    """Lines on what is another than in the state and takes effect.

    Raises ResumeError, with the names of what is another and could not, and the remedy.
    """
    same_content = {name for name, value in fingerprints.items() if manifest.fingerprints.get(name) == value}
    now, before = plain(config), manifest.config
    changed = {name for name in now.keys() & before.keys() if now[name] != before[name]} - same_content
    fixed = {"precision"} if getattr(config, "reference_decay", 0.0) else set()  # half precision has a mean of its own
    refused = sorted(changed - (config.changeable() - fixed))
    if refused:
        flags = ", ".join(f"--{name} ({before[name]} before, {now[name]} now)" for name in refused)
        raise ResumeError(f"--resume: this would be another run: {flags}. Give what was before, or a new --output_dir")
    others = sorted(name for name in fingerprints.keys() & manifest.fingerprints.keys() if name not in same_content)
    contents = [name for name in others if not name.endswith(FUNCTION)]
    if contents:
        # Of several rewards, a name of its own stands behind the option.
        flags = ", ".join(f"--{name}" if " " in name else f"--{name} ({getattr(config, name)})" for name in contents)
        raise ResumeError(
            f"--resume: the name is the same, and the content another than when the run began: {flags}. Bring back "
            "what was there, or begin a new --output_dir"
        )
    silent = {"resume", "output_dir"}
    lines = [
        f"resuming with another {name}: {before[name]} before, {now[name]} now" for name in sorted(changed - silent)
    ]
    lines += [f"resuming with another source of the {name}" for name in others]
    if processes != manifest.processes:
        lines.append(f"resuming on another number of processes: {manifest.processes} before, {processes} now")
    return lines


def plain(config: RunConfig) -> dict[str, Any]:
    """The options as JSON has them."""
    return {name: value for name, value in vars(config).items() if isinstance(value, int | float | str | bool | None)}
