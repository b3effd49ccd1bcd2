# shellcheck shell=bash disable=SC2034 # read by contract.sh
# Settings of launch/tpu_vm.sh and launch/xpk.sh: copy this file to launch/settings.sh, edit the copy.

# The job: python -m sink_jax JOB --config=CONFIG --workdir=WORKDIR ARGUMENTS
NAME=sink-jax            # of the job: small letters, digits and -
JOB=train                # train, or sweep
CONFIG=configs/base.py   # a config file, such as configs/paper.py:1b-softmax; of this repository
WORKDIR=                 # gs://BUCKET/PATH: the same command on the same workdir resumes
DATA=                    # gs://BUCKET/PATH of python -m sink_jax data_build; with its tokenizer and context
ARGUMENTS=()             # more: (--config.mesh.fsdp=16 --config.model.remat=blocks); plan prints them
RESTARTS=100             # how often a stopped or dead job is started again
GRACE=120                # seconds that a job gets to save when it is stopped
COMPILER_FLAGS=          # of XLA for TPUs, such as --xla_tpu_...=true; docs/launching.md has those of others

# The TPUs
PROJECT=                 # Google Cloud project, as gcloud projects list shows it
ZONE=                    # where the TPUs are, such as us-east5-a
TPU_TYPE=                # accelerator type, such as v5litepod-256 or v6e-64
PROVISIONING=on-demand   # on-demand, spot or reserved
RESERVATION=             # name of the reservation, with PROVISIONING=reserved

# launch/tpu_vm.sh
TPU_NAME=sink-jax        # of the TPU VM and of its queued resource
TPU_RUNTIME=             # runtime version, such as v2-alpha-tpuv5-lite or v2-alpha-tpuv6e

# launch/xpk.sh
CLUSTER=                 # name of the cluster, of xpk cluster create
IMAGE=                   # built from launch/Dockerfile and pushed, REGISTRY/NAME:TAG
SLICES=1                 # slices of TPU_TYPE that train one model
SHARDS=1                 # of a sweep: so many workloads, each with its part of the trials
