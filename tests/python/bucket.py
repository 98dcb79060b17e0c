"""An S3 server on loopback: moto's server as a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import boto3
import requests
from botocore.config import Config

from support import START_SECONDS, STOP_SECONDS, free_ports


class BucketServer:
    """The server with one bucket, and a boto3 client."""

    def __init__(self, folder: Path, bucket: str) -> None:
        (port,) = free_ports(1)
        self.bucket, self.endpoint = bucket, f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "eu-central-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with (folder / "moto.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.environment}
            )
        self.wait()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="eu-central-1",
            config=Config(s3={"addressing_style": "path"}),
        )
        location = {"LocationConstraint": "eu-central-1"}
        self.client.create_bucket(Bucket=bucket, CreateBucketConfiguration=location)

    def wait(self) -> None:
        for _ in range(START_SECONDS * 10):
            try:
                requests.get(f"{self.endpoint}/moto-api/", timeout=2)
            except requests.RequestException:
                time.sleep(0.1)
            else:
                return
        raise AssertionError("the S3 server did not start")

    def keys(self) -> list[str]:
        listing = self.client.list_objects_v2(Bucket=self.bucket)
        return [entry["Key"] for entry in listing.get("Contents", [])]

    def read(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def write(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=content)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=STOP_SECONDS)
