"""docs/security.md names tests that exist, and what no other test holds of it."""

import ast
import re
from ipaddress import ip_address
from pathlib import Path

import pytest

import foreglance
from foreglance.cli.show import harmless
from foreglance.serve.remote import is_public
from foreglance.serve.settings import ServerSettings

PACKAGE = Path(foreglance.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "security.md"


def test_every_test_that_the_page_names_exists():
    sources = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 20
    assert not [name for name in named if f"def {name}(" not in sources]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_reads_pickles_or_runs_code_from_a_checkpoint(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [
                node.module or "" if isinstance(node, ast.ImportFrom) else ""
            ]
            assert not {name.split(".")[0] for name in names} & {"pickle", "marshal", "shelve", "dill", "joblib"}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "compile", "torch.load", "__import__"), called
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code":
                    assert isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "shell":
                    assert isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if called.endswith(("AutoConfig.from_pretrained", "AutoTokenizer.from_pretrained")):
                assert "trust_remote_code" in [keyword.arg for keyword in node.keywords]


PRIVATE = (
    "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "::1", "fe80::1", "fc00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:1::1", "240.0.0.1",
)  # fmt: skip


def test_remote_pictures_are_off_and_the_gate_knows_private_addresses():
    assert ServerSettings().remote_images is False
    assert not [address for address in PRIVATE if is_public(ip_address(address))]
    assert is_public(ip_address("8.8.8.8")) and is_public(ip_address("2606:4700::1111"))


def test_a_terminal_gets_no_control_characters():
    """No escape sequence, no bell, no text that runs backwards; line ends and tabs stay."""
    assert harmless("a\x1b[31mred\x07\x08\x9b\u202e\u2066b\n\tc") == "a[31mredb\n\tc"
