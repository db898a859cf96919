# Images of all services for several platforms: `make images` (docker buildx bake). PUSH=1 sends them
# to the registry that IMAGE names. Without it, an engine with the containerd image store keeps them.
variable "VERSION" { default = "0.1.0" }
variable "IMAGE" { default = "quire" }
variable "PIP_EXTRA_INDEX_URL" { default = "" }

group "default" { targets = ["control", "worker", "mover"] }

target "common" {
  context    = "."
  platforms  = ["linux/amd64", "linux/arm64"]
  args       = { PIP_EXTRA_INDEX_URL = PIP_EXTRA_INDEX_URL }
  labels = {
    "org.opencontainers.image.title"    = "Quire"
    "org.opencontainers.image.version"  = VERSION
    "org.opencontainers.image.licenses" = "Apache-2.0"
  }
}

target "control" {
  inherits = ["common"]
  target   = "control"
  tags     = ["${IMAGE}-control:${VERSION}", "${IMAGE}-control:latest"]
}

target "mover" {
  inherits = ["common"]
  target   = "mover"
  tags     = ["${IMAGE}-mover:${VERSION}", "${IMAGE}-mover:latest"]
}

target "worker" {
  inherits = ["common"]
  target   = "worker"
  tags     = ["${IMAGE}-worker:${VERSION}", "${IMAGE}-worker:latest"]
}
