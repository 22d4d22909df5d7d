"""What Kedge finds out by itself about plain requests: agents, their prompts' templates, and the text they share."""

from kedge.discovery.discovery import Discovery, Found
from kedge.discovery.plain_requests import FoundForecasts, PlainRequests
from kedge.discovery.report import Served

__all__ = ["Discovery", "Found", "FoundForecasts", "PlainRequests", "Served"]
