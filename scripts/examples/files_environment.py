"""P3O in an environment of files: `python scripts/examples/files_environment.py [MODEL]` learns to
fill in a form.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

from fastp3o import P3OConfig, train


class Desk:
    """A temporary folder with a form. A turn is `cd desk`, `open form`, `set FIELD VALUE`, `save`
    or `done`.

    Five parts of the reward are measured in the files, each paid once: in the form's folder (nav),
    the form is open (ui), the share of its fields that are right (form), a saved file (file), and
    done with all right in it (goal).
    """

    rewards: ClassVar = {"nav": 0.1, "ui": 0.2, "form": 0.2, "file": 0.3, "goal": 0.2}

    def reset(self, answers: dict[str, str]) -> str:
        """answers: the values that are asked for, by the form's fields."""
        self.folder = self.place = Path(tempfile.mkdtemp(prefix="desk-"))
        self.form, self.saved = self.folder / "desk" / "form", self.folder / "desk" / "saved"
        self.answers, self.opened, self.paid = answers, False, dict.fromkeys(self.rewards, 0.0)
        self.form.parent.mkdir()
        self.form.write_text(lines(dict.fromkeys(answers, "")))
        return "desk/\n"

    def step(self, text: str) -> tuple[str, dict[str, float], bool]:
        fields = dict(line.split(": ", 1) for line in self.form.read_text().splitlines())
        match text.split():
            case ["cd", "desk"]:
                self.place = self.form.parent
            case ["open", "form"] if self.place == self.form.parent:
                self.opened = True
            case ["set", field, *words] if self.opened and field in fields:
                self.form.write_text(lines(fields | {field: " ".join(words)}))
            case ["save"] if self.opened:
                shutil.copy(self.form, self.saved)
        done = text.split() == ["done"]
        gained = {
            name: max(0.0, value - self.paid[name]) for name, value in self.parts(done).items()
        }
        self.paid = {name: self.paid[name] + value for name, value in gained.items()}
        return self.form.read_text() if self.opened else f"{self.place.name}/\n", gained, done

    def parts(self, done: bool) -> dict[str, float]:
        wanted, form = lines(self.answers), self.form.read_text().splitlines()
        return {
            "nav": float(self.place == self.form.parent),
            "ui": float(self.opened),
            "form": sum(line in form for line in wanted.splitlines()) / len(self.answers),
            "file": float(self.saved.exists()),
            "goal": float(done and self.saved.exists() and self.saved.read_text() == wanted),
        }

    def close(self) -> None:
        shutil.rmtree(self.folder)


def lines(fields: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


if __name__ == "__main__":
    answers = [
        {"name": name, "city": city}
        for name in ("Ada", "Alan", "Grace")
        for city in ("London", "Paris")
    ]
    task = "Fill in the form: cd desk, open form, set FIELD VALUE, save, done, a command a line.\n"
    config = P3OConfig(
        model=sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B-Base",
        output_dir="runs/desk",
        updates=10,
        prompts_per_update=8,
        max_turns=6,
        max_turn_tokens=16,
        max_response_tokens=256,
        stop_strings=["\n"],
    )
    prompts = [{"prompt": f"{task}{lines(one)}", "answers": one} for one in answers]
    result = train(config, prompts=prompts, environment=Desk, reward="environment")
    print(result.history[["reward", "reward/nav", "reward/goal"]])
