"""The README's Python example runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_example_of_the_readme_runs_and_drafts(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 1
    script = tmp_path / "example.py"
    script.write_text(blocks[0] + "\nassert output['usage']['completion_tokens'] == 64, output\n"
                      "assert llm.stats.accepted > 0, llm.stats\n", encoding="utf-8")  # fmt: skip
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
    assert "accepted" in result.stdout
