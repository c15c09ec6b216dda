"""The error classes: what each can be caught as, what it prints, and that copies keep all of it."""

import copy
import pickle

import pytest

from dcpkernels import errors

BUILTIN = {
    "DcpError": RuntimeError,
    "DcpInvalidArgument": ValueError,
    "DcpUnsupported": NotImplementedError,
    "DcpTimeout": TimeoutError,
    "DcpPeerLost": TimeoutError,
    "DcpMismatch": RuntimeError,
    "DcpDeviceError": RuntimeError,
}


def test_the_table_names_every_class():
    defined = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.DcpError)}
    assert defined == set(BUILTIN)
    assert issubclass(errors.DcpPeerLost, errors.DcpTimeout)


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("text", ["op: x must hold (got 3)", "", "100 % and {braces}\nsecond line"])
def test_class_text_and_ranks(name, text):
    cls = getattr(errors, name)
    error = cls(text, ranks=[5, 1, 5])
    for base in (errors.DcpError, RuntimeError, BUILTIN[name]):
        assert isinstance(error, base)
    assert str(error) == text and error.args == (text,) and error.ranks == (1, 5)
    assert cls(text).ranks == ()


@pytest.mark.parametrize("name", BUILTIN)
def test_copies_keep_text_ranks_and_notes(name):
    error = getattr(errors, name)("op: must hold (got 1)", ranks=(2,))
    error.__notes__ = ["seen by a test"]
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error) and str(twin) == str(error) and twin.ranks == (2,)
        assert twin.__notes__ == ["seen by a test"]


@pytest.mark.parametrize("name", BUILTIN)
def test_ranks_is_keyword_only_and_two_positionals_are_refused(name):
    # OSError would take (errno, text) here and turn into another class; that must not happen silently.
    with pytest.raises(TypeError):
        getattr(errors, name)(2, "no such file")


def test_timeout_has_no_errno_and_may_carry_one():
    error = errors.DcpTimeout("op: late (30 s)")
    assert error.errno is None
    error.errno = 110
    assert str(error) == "op: late (30 s)"
