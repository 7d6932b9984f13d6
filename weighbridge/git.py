"""What git knows of the directory a job is submitted from; nothing where there is no repository."""

from __future__ import annotations

import subprocess
from pathlib import Path


def read_git_facts(directory: Path) -> dict[str, str]:
    """`commit_sha` and `branch` of the checkout that holds `directory`, each only where git knows it."""
    facts = {}
    sha = _git(directory, "rev-parse", "--verify", "HEAD")
    if sha:
        facts["commit_sha"] = sha
        branch = _git(directory, "symbolic-ref", "--quiet", "--short", "HEAD")
        if branch:
            facts["branch"] = branch
    return facts


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
