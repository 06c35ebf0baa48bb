"""What a job asks of YARN."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launch import JobSpec, Machine, backend, parse_group
from paceline.launch.engines.yarn.yarn_backend import YarnRequest, resource_manager
from tests.engines.yarn_stand_in import faults

MACHINE = Machine("/usr/bin/python3", {}, {"PYTHONPATH": "/home/ada/train/src"}, "/home/ada/train")


def plan(*groups: str, machine: Machine = MACHINE, **options: str) -> YarnRequest:
    spec = JobSpec(
        ("train",), 0 if groups else 2, 1, "0123abcd", groups=tuple(map(parse_group, groups)), options=options
    )
    request = backend("yarn").plan(spec, machine)
    assert isinstance(request, YarnRequest)
    return request


def test_service_has_no_field_that_yarn_does_not_know() -> None:
    request = plan("a: n=2, cpus=4, gpus=1, memory=8Gi", "b: n=1", queue="research", time="3600", rm="http://rm:8088")
    service = request.service("h:1", "key")
    assert faults(service, "Service", "service") == []
    assert [one["name"] for one in service["components"]] == ["scheduler", "server", "worker-a", "worker-b"]
    assert all("h:1" in one["launch_command"] for one in service["components"])


def test_service_names_the_file_of_the_key_and_not_the_key() -> None:
    request = plan(key_folder="/home/ada/keys")
    service = request.service("h:1", "the secret")
    assert service["configuration"]["env"]["PACELINE_HUB_KEY_FILE"] == "/home/ada/keys/pl-0123abcd.key"
    assert "the secret" not in str(service)
    assert "the secret" in str(plan().service("h:1", "the secret"))


def test_stand_in_knows_a_wrong_service() -> None:
    service = plan().service("h:1", "key")
    for change, fault in (
        ({"nonsense": 1}, "service (Service) has an unknown field nonsense"),
        ({"lifetime": "1"}, "service (Service).lifetime is not of type int"),
        ({"id": "x"}, "service (Service).id is only in answers"),
    ):
        assert faults({**service, **change}, "Service", "service") == [fault]
    del service["components"][0]["name"]
    assert "service (Service).components[0] (Component) has no name" in faults(service, "Service", "service")


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ((), {"rmm": "x"}, "launcher 'yarn' has no option 'rmm'; did you mean 'rm'"),
        ((), {"rm": "rm:8088"}, "rm='rm:8088' is not a web address such as http://rm:8088"),
        ((), {"memory": "much"}, "memory='much' is not an amount such as 2, 0.5 or 8Gi"),
        ((), {"port": "70000"}, "port=70000 does not exist"),
        ((), {"wait": "0"}, "wait above 0"),
        ((), {"key_folder": "keys"}, "key-folder='keys' is not an absolute path"),
        ((), {"python": "/a b/python"}, "'/a b/python': YARN's commands take letters"),
        (("a: n=1, select=x=y",), {}, "group a: YARN chooses the nodes"),
        (("a: n=1, cpus=1.5",), {}, "cpus='1.5': this launcher takes integers only"),
        ((f"{'a' * 40}: n=1",), {}, "its name is too long for YARN's Registry DNS"),
    ],
)
def test_what_yarn_cannot_do_is_an_error(groups: tuple[str, ...], options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
        plan(*groups, **options)
    assert message in str(caught.value)


def test_address_of_the_resource_manager_is_that_of_hadoops_configuration(tmp_path: Path) -> None:
    assert resource_manager({}) == ""
    assert resource_manager({"HADOOP_CONF_DIR": str(tmp_path)}) == ""
    name = "yarn.resourcemanager.webapp.address"
    text = f"<configuration><property><name>{name}</name><value> rm7:8088 </value></property></configuration>"
    (tmp_path / "yarn-site.xml").write_text(text)
    assert resource_manager({"HADOOP_CONF_DIR": str(tmp_path)}) == "http://rm7:8088"
    machine = Machine("python3", {}, {"HADOOP_CONF_DIR": str(tmp_path), "HADOOP_USER_NAME": "ada"}, "/home/ada/train")
    assert (plan(machine=machine).options.rm, plan(machine=machine).options.user) == ("http://rm7:8088", "ada")
