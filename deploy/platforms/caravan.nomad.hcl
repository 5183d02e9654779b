# nomad job run deploy/platforms/caravan.nomad.hcl
job "caravan" {
  datacenters = ["dc1"]

  group "serve" {
    count = 1

    network {
      port "http" {}
    }

    service {
      name     = "caravan"
      port     = "http"
      provider = "nomad"

      check {
        type     = "http"
        path     = "/readyz"
        interval = "5s"
        timeout  = "2s"
      }
    }

    # The old allocation has its GPU and its shards until it ends.
    update {
      max_parallel     = 1
      health_check     = "checks"
      healthy_deadline = "15m"
      auto_revert      = true
    }

    task "caravan" {
      driver       = "docker"
      kill_timeout = "100s"

      config {
        image = "registry.example.com/ml/caravan-serve:0.5.0"
        ports = ["http"]
        args = [
          "serve",
          "/models/qwen.gguf",
          "--alias=qwen",
          "--port=${NOMAD_PORT_http}",
          "--hostname=0.0.0.0",
          "--graceful-termination-timeout=90",
        ]
        readonly_rootfs = true
        cap_drop        = ["all"]
        volumes         = ["/srv/models:/models:ro"]

        mount {
          type   = "tmpfs"
          target = "/tmp"
        }
      }

      resources {
        cores  = 4
        memory = 8192
      }
    }
  }
}
