"""Addresses of replicas: valid ones, refused ones, and a name server that does not answer."""

import socket

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.fleet import discovery


def answers(monkeypatch, result):
    def getaddrinfo(name, port, **_):
        if isinstance(result[0], Exception):
            raise result[0]
        return [(None, None, None, "", (address, port)) for address in result[0]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_fixed_list():
    assert discovery.static(["http://a:1", "http://b:2/"])() == {"http://a:1", "http://b:2"}


@pytest.mark.parametrize(
    "url", ["a:1", "https://a:1", "http://a", "http://a:1/v1", "http://a:x", "http://:80", "http://a..b:1", ""]
)
def test_invalid_addresses_are_refused(url):
    with pytest.raises(KimiError, match="cannot read the replica"):
        discovery.static([url])


def test_the_same_replica_twice_is_refused():
    with pytest.raises(KimiError, match="twice"):
        discovery.static(["http://a:1", "http://a:1/"])


def test_every_address_of_a_name(monkeypatch):
    result = [["10.0.0.1", "10.0.0.2", "10.0.0.1"]]
    answers(monkeypatch, result)
    discover = discovery.dns("replicas.kimi.svc:9527")
    assert discover() == {"http://10.0.0.1:9527", "http://10.0.0.2:9527"}
    result[0] = ["fd00::1", "fd00::2"]
    assert discover() == {"http://[fd00::1]:9527", "http://[fd00::2]:9527"}
    result[0] = ["fd00::1", "10.0.0.1"]  # two addresses of one pod
    assert discover() == {"http://10.0.0.1:9527"}


def test_no_ready_pod_is_no_replica_but_no_name_server_keeps_the_last(monkeypatch):
    result = [["10.0.0.1"]]
    answers(monkeypatch, result)
    discover = discovery.dns("replicas:9527")
    assert discover() == {"http://10.0.0.1:9527"}
    result[0] = socket.gaierror(socket.EAI_AGAIN, "try again")
    assert discover() == {"http://10.0.0.1:9527"}
    result[0] = socket.gaierror(socket.EAI_NONAME, "unknown")
    assert discover() == frozenset()
    result[0] = socket.gaierror(socket.EAI_AGAIN, "try again")
    assert discover() == frozenset()


@pytest.mark.parametrize(
    "text", ["replicas", "replicas:", ":9527", "replicas:0", "replicas:http", "replicas:70000", "a..b:1"]
)
def test_a_name_needs_a_port(text):
    with pytest.raises(KimiError, match="cannot read"):
        discovery.dns(text)
