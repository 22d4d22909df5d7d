"""Adapters of Kedge to other frameworks.

Each module needs the packages of one extra only, and names that extra if they are missing:
`kedge.integrations.langgraph`, `kedge.integrations.openai_agents`, `kedge.integrations.openai_client`.
"""
