# shellcheck shell=bash disable=SC2034 # read by contract.sh
# Settings of the launchers: copy this file to launch/settings.sh and edit the copy, nothing else.
# An empty value means "none", unless a launcher needs it; then it ends before it begins.

# The job: python -m sink_jax.JOB --config=CONFIG --workdir=WORKDIR ARGUMENTS
NAME=sink-jax                # of the job, everywhere: small letters, digits and -
JOB=train                    # train, or sweep
CONFIG=configs/base.py       # a config file, such as configs/window.py:window-512,budget=tenth
WORKDIR=                     # a folder that all hosts see: gs://BUCKET/PATH, or on NFS
DATA=                        # folder of python -m sink_jax data_build; empty: what CONFIG says
ARGUMENTS=()                 # more of the command line: (--config.mesh.fsdp=8 --config.steps=100)
SHARDS=1                     # of a sweep: so many jobs, each with its part of the trials
RESTARTS=100                 # how often a job that was stopped or died is started again
GRACE=120                    # seconds a job gets to save when it is told to stop

# This machine: launch/local.sh
PROCESSES=1                  # on this machine; with GPUs each gets its share of them
DEVICES=                     # simulated CPU devices of each process; empty: what is there

# What a job runs on, for GKE, xpk and SkyPilot
HARDWARE=tpu                 # tpu, gpu or cpu
PROVISIONING=on-demand       # on-demand, spot, reserved or flex-start
RESERVATION=                 # name of the reservation, with PROVISIONING=reserved
PROJECT=                     # Google Cloud project, as gcloud projects list shows it
ZONE=                        # where the TPUs are, such as us-east5-a

# TPU VMs: launch/tpu_vm.sh
TPU_NAME=                    # of the TPU VM and of its queued resource, your choice
TPU_TYPE=                    # accelerator type, such as v5litepod-16 or v6e-64; also for xpk
TPU_RUNTIME=                 # runtime version, such as v2-alpha-tpuv5-lite or v2-alpha-tpuv6e
TPU_PYTHON=python3.12        # on the hosts, 3.11 to 3.13; installed with apt-get if missing
MAX_RUN=24h                  # with flex-start: the TPU is taken away after this time

# Containers: launch/gke.sh and launch/xpk.sh
IMAGE=                       # built from launch/Dockerfile and pushed, REGISTRY/NAME:TAG

# GKE: launch/gke.sh
NAMESPACE=default            # of Kubernetes
ACCELERATOR=                 # label of the nodes: tpu-v5-lite-podslice, or nvidia-h100-80gb
TOPOLOGY=                    # of a TPU slice, such as 4x4
SLICES=1                     # TPU slices of one job
HOSTS=1                      # machines of a slice, or of a job without TPUs
CHIPS=4                      # TPU chips or GPUs of a machine; 0 without
QUEUE=                       # Kueue's LocalQueue; empty: no Kueue
SERVICE_ACCOUNT=             # of Kubernetes, one that may read and write gs://; empty: the default

# xpk: launch/xpk.sh, with PROJECT, ZONE, TPU_TYPE, SLICES and IMAGE
CLUSTER=                     # name of the cluster that xpk made

# SLURM: launch/slurm.sh
SLURM_PARTITION=             # empty: the default one
SLURM_NODES=1                # of one job
SLURM_GPUS=0                 # of a node; each gets a process of its own
SLURM_TASKS=1                # processes of a node without GPUs
SLURM_TIME=24:00:00          # after which SLURM stops a job; it saves, and queues again
SLURM_OPTIONS=()             # more options of sbatch: (--account=lab --mem=64G)

# SkyPilot: launch/sky.sh
SKY_ACCELERATORS=            # such as H100:8 or tpu-v6e-8; empty: CPUs
SKY_NODES=1                  # machines of the job
SKY_CLOUD=                   # such as gcp/us-central1; empty: the cheapest anywhere
