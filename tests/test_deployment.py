"""The files around a deployment: KubeRay, Prometheus, Grafana, the image. They agree with each
other, with the settings that they deploy, and with the versions that CI runs."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from outrider.cluster.config import Settings, load_settings, parse_settings
from outrider.cluster.placement import Node, plan, shortage, total

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
SOURCE = CONFIGS / "llama-70b.yaml"
YAML_FILES = sorted(path for path in CONFIGS.rglob("*.y*ml"))
PROMTOOL = shutil.which("promtool")

# Fields of KubeRay's Go types (ray-operator/apis/ray/v1, 1.6), all that we may want. Kubernetes
# drops a field that it does not know without a word.
KUBERAY = {
    "RayServiceSpec": {
        "rayClusterDeletionDelaySeconds", "serveService", "upgradeStrategy", "serveConfigV2",
        "rayClusterConfig", "excludeHeadPodFromServeSvc",
    },
    "rayClusterConfig": {
        "upgradeStrategy", "authOptions", "suspend", "managedBy", "autoscalerOptions",
        "headServiceAnnotations", "enableInTreeAutoscaling", "gcsFaultToleranceOptions",
        "headGroupSpec", "rayVersion", "workerGroupSpecs",
    },
    "autoscalerOptions": {
        "resources", "image", "imagePullPolicy", "securityContext", "idleTimeoutSeconds",
        "upscalingMode", "version", "env", "envFrom", "volumeMounts", "command", "args",
    },
    "authOptions": {"mode", "secretName", "enableK8sTokenAuth"},
    "headGroupSpec": {
        "template", "headService", "enableIngress", "ingressOptions", "resources", "labels",
        "rayStartParams", "serviceType",
    },
    "workerGroupSpecs": {
        "suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds",
        "priority", "resources", "labels", "rayStartParams", "template", "scaleStrategy",
        "numOfHosts",
    },
    "template": {"metadata", "spec"},
    "spec": {  # a pod's: those in use
        "containers", "nodeSelector", "securityContext", "terminationGracePeriodSeconds",
        "tolerations", "volumes",
    },
    "securityContext": {"fsGroup", "fsGroupChangePolicy"},
    "containers": {
        "name", "image", "ports", "env", "resources", "volumeMounts",
    },
}  # fmt: skip


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is there twice: YAML would keep the last without a word."""


def _unique(loader: StrictLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    keys = [key.value for key, _ in node.value]
    assert len(set(keys)) == len(keys), f"a key is there twice: {keys} {node.start_mark}"
    return loader.construct_mapping(node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique)


def load(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), StrictLoader)


@pytest.fixture(scope="module")
def service() -> Any:
    return load(CONFIGS / "kuberay" / "rayservice.yaml")


@pytest.fixture(scope="module")
def monitor() -> Any:
    return load(CONFIGS / "kuberay" / "podmonitor.yaml")


@pytest.fixture(scope="module")
def settings() -> Settings:
    return load_settings(SOURCE)


def groups(service: Any) -> list[Any]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: Any) -> Any:
    (only,) = group["template"]["spec"]["containers"]
    return only


def ports(group: Any) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(group)["ports"]}


def ray_nodes(service: Any, skipped: str = "") -> list[Node]:
    """The Ray nodes of the worker groups, as Ray will see them."""
    nodes = []
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        limits = container(group)["resources"]["limits"]
        offer = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
        if group["groupName"] != skipped:
            nodes += [Node(group["labels"], offer)] * group["replicas"]
    return nodes


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_yaml_file_loads_and_names_no_key_twice(path: Path) -> None:
    assert isinstance(load(path), dict)


def test_the_embedded_serve_configuration_is_the_one_of_its_source(service: Any) -> None:
    embedded = yaml.load(service["spec"]["serveConfigV2"], StrictLoader)
    ServeDeploySchema.model_validate(embedded)
    application = embedded["applications"][0]
    assert parse_settings(application["args"]) == load_settings(SOURCE)
    assert embedded == load(SOURCE)


def test_the_ingress_is_placed_beside_the_target(settings: Settings) -> None:
    from outrider.deploy.app import build  # here, for torch is slow to import

    def options(settings: Settings) -> Any:
        return build(settings)._bound_deployment.ray_actor_options

    assert options(settings)["label_selector"] == settings.target.labels != {}
    unlabelled = parse_settings({"target": {"model": "a/b"}})
    assert "label_selector" not in options(unlabelled)


def test_the_rayservice_uses_fields_that_kuberay_has(service: Any) -> None:
    def walk(value: Any, name: str) -> Iterator[str]:
        if isinstance(value, list):
            for item in value:
                yield from walk(item, name)
        elif isinstance(value, dict):
            if name in KUBERAY:
                yield from (f"{name}.{key}" for key in value.keys() - KUBERAY[name])
            for key, item in value.items():
                yield from walk(item, key)

    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert not list(walk(service["spec"], "RayServiceSpec"))
    assert service["spec"]["upgradeStrategy"]["type"] in {"NewCluster", "None"}
    assert cluster["authOptions"]["mode"] in {"token", "disabled"}
    assert cluster["autoscalerOptions"]["version"] == "v2"
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        # They are kubectl's strings, Ray's numbers and labels.
        assert all(isinstance(value, str) for value in group["labels"].values())
    for group in groups(service):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container(group)["volumeMounts"]} <= volumes


def test_the_worker_groups_hold_exactly_the_actors_of_the_settings(
    service: Any, settings: Settings
) -> None:
    actors = plan(settings)
    nodes = ray_nodes(service)
    assert shortage(actors, nodes) is None
    assert sum(node.resources["GPU"] for node in nodes) == total(actors)["GPU"]
    for group in ("target", "draft"):
        assert f"{group} " in (shortage(actors, ray_nodes(service, skipped=group)) or "")


def test_every_pod_may_write_the_models(service: Any) -> None:
    for group in groups(service):
        spec = group["template"]["spec"]
        owner = {"fsGroup": 100, "fsGroupChangePolicy": "OnRootMismatch"}  # the image's group
        assert spec["securityContext"] == owner
        claims = [volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
        assert {"models"} == {claim["name"] for claim in claims}


def test_the_object_store_fits_into_shared_memory_and_that_into_the_pod(service: Any) -> None:
    gib = 1 << 30
    for group in groups(service):
        (shm,) = (
            volume["emptyDir"]["sizeLimit"]
            for volume in group["template"]["spec"]["volumes"]
            if volume["name"] == "shm"
        )
        memory = container(group)["resources"]["limits"]["memory"]
        store = int(group["rayStartParams"]["object-store-memory"])
        assert 2 * store <= int(shm.removesuffix("Gi")) * gib  # room for NCCL
        assert 2 * int(shm.removesuffix("Gi")) <= int(memory.removesuffix("Gi"))


def test_a_draft_fits_the_smallest_machine_with_an_l4(service: Any) -> None:
    _, _, draft = groups(service)
    requests = container(draft)["resources"]["requests"]
    assert requests == container(draft)["resources"]["limits"]
    assert float(requests["cpu"]) <= 3.5  # of 4, less what Kubernetes and its daemons take
    assert int(requests["memory"].removesuffix("Gi")) <= 12  # of 16 GB, likewise


def test_nothing_asks_the_head_for_a_worker(service: Any) -> None:
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in container(head)["resources"]["limits"]


def test_every_port_that_is_scraped_is_open_and_every_metrics_port_is_scraped(
    service: Any, monitor: Any, settings: Settings
) -> None:
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    every = [ports(group) for group in groups(service)]
    numbers = {name: {open_[name] for open_ in every if name in open_} for name in scraped}
    assert numbers == {
        "metrics": {8080},
        "as-metrics": {44217},
        "dash-metrics": {44227},
        **({} if settings.metrics.port is None else {"outrider": {settings.metrics.port}}),
    }
    assert all("metrics" in open_ for open_ in every)
    http_port = load(SOURCE)["http_options"]["port"]
    assert all(open_["serve"] == http_port for open_ in every)
    _, target, _ = every
    if settings.metrics.port is not None:  # the coordinator runs on the target's node
        assert target["outrider"] == settings.metrics.port
        assert settings.metrics.host == "0.0.0.0"


def test_the_podmonitor_selects_every_pod_of_the_service(service: Any, monitor: Any) -> None:
    wanted = dict(monitor["spec"]["selector"]["matchLabels"])
    assert wanted.pop("ray.io/is-ray-node") == "yes"  # KubeRay's own
    assert wanted
    for group in groups(service):
        assert wanted.items() <= group["template"]["metadata"]["labels"].items()


def test_versions_agree(service: Any) -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    (ray,) = re.findall(r"^ray==(.+)$", constraints, re.MULTILINE)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == ray
    assert f"rayproject/ray:{ray}-" in dockerfile
    assert f"/outrider:{version} " in dockerfile
    for group in groups(service):
        assert container(group)["image"].endswith(f"/outrider:{version}")


def test_the_sources_in_the_image_are_not_in_the_way_of_the_installed_package() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    folders = [line.split()[1] for line in lines if line.startswith("WORKDIR ")]
    assert len(folders) == 2
    source, last = map(Path, folders)
    assert f"RUN mkdir -p {source}" in lines
    assert last not in (source, source / "outrider") and source.name != "outrider"


def test_the_image_copies_all_that_an_install_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.partition(".")[2] for name in project["tool"]["setuptools"]["packages"]}
    files = {project["project"]["readme"], *project["project"]["license-files"]}
    lines = re.findall(
        r"^COPY --chown=ray (.+) \S+$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE
    )
    copied = {name for line in lines for name in line.split()}
    assert copied == packages | files | {"pyproject.toml", "constraints.txt"}


def test_prometheus_reads_rays_discovery_file_and_our_rules() -> None:
    document = load(CONFIGS / "prometheus" / "prometheus.yml")
    (job,) = document["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": ["/tmp/ray/prom_metrics_service_discovery.json"]}]
    assert document["rule_files"] == ["rules.yml"]


@pytest.mark.parametrize("alertmanager", [False, True], ids=["as it is", "with an Alertmanager"])
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_wrong(alertmanager: bool, tmp_path: Path) -> None:
    assert PROMTOOL is not None
    text = (CONFIGS / "prometheus" / "prometheus.yml").read_text()
    if alertmanager:
        (lines,) = re.findall(r"^# alerting:\n(?:#.*\n)+", text, re.MULTILINE)
        text = text.replace(lines, re.sub(r"^# ", "", lines, flags=re.MULTILINE))
        assert yaml.safe_load(text)["alerting"]["alertmanagers"]
    path = tmp_path / "prometheus.yml"
    path.write_text(text)
    # Syntax only: the discovery file is Ray's, and the rules have a test of their own.
    command = [PROMTOOL, "check", "config", "--syntax-only", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_grafana_is_provisioned_with_one_prometheus_and_one_folder() -> None:
    folder = CONFIGS / "grafana" / "provisioning"
    scrape = load(CONFIGS / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    (source,) = load(folder / "datasources" / "prometheus.yml")["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert source["jsonData"]["timeInterval"] == scrape
    (provider,) = load(folder / "dashboards" / "outrider.yml")["providers"]
    assert provider["type"] == "file" and provider["options"]["path"].startswith("/")
