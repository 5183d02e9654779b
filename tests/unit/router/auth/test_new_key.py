import pytest

from caravan_dialects.auth.key import digest_of
from caravan_router.auth.key_file import parse_keys
from caravan_router.auth.new_key import main


def test_the_printed_entry_holds_the_digest_of_the_printed_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alice"]) == 0
    out, err = capsys.readouterr()
    secret = err.strip().rpartition(" ")[2]
    [key] = parse_keys(out)
    assert (key.tenant.name, key.digest) == ("alice", digest_of(secret))
    assert not key.operator
    assert len(secret) >= 43
    assert secret not in out


def test_the_key_of_an_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["olga", "--operator"]) == 0
    [key] = parse_keys(capsys.readouterr().out)
    assert key.operator


def test_every_new_key_is_different(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a"]) == main(["b"]) == 0
    first, second = parse_keys(capsys.readouterr().out)
    assert first.digest != second.digest


@pytest.mark.parametrize("name", ["", "a b", 'a"'])
def test_a_name_that_the_key_file_would_refuse_is_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name])
    assert stop.value.code == 2
    assert "NAME must have 1 to 64" in capsys.readouterr().err
