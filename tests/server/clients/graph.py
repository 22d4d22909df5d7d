"""LangGraph as a client: a graph of a model and its tools, whose checkpoints are the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import ToolNode, tools_condition

from tests.server.clients.histories import MODEL, SYSTEM, Made, OpenAiSdk, Overflow


class LangGraph(OpenAiSdk):
    """A graph that stops before its tools, with `langchain_openai`."""

    config: Any = {"configurable": {"thread_id": "t"}}

    def begin(self) -> None:
        @tool
        def weather(town: str = "here") -> Any:  # noqa: ARG001
            """Tells the weather."""
            return self.returned.pop(0)

        self.returned: list[Any] = []
        self.given: list[Any] = [SystemMessage(SYSTEM)]
        self.tools = [convert_to_openai_tool(weather)["function"]]
        base = f"{self.served.url}/v1"
        model = ChatOpenAI(base_url=base, api_key="none", model=MODEL, max_retries=0, max_tokens=2000)  # type: ignore[arg-type]
        bound = model.bind_tools([weather])
        building = StateGraph(MessagesState)
        building.add_node("agent", lambda state: {"messages": [bound.invoke(state["messages"])]})
        building.add_node("tools", ToolNode([weather]))
        building.add_edge(START, "agent")
        building.add_conditional_edges("agent", tools_condition)
        building.add_edge("tools", "agent")
        self.graph = building.compile(checkpointer=InMemorySaver(), interrupt_before=["tools"])

    def user(self, text: str, *, image: bool = False) -> None:
        content: Any = [{"type": "text", "text": text}, self.picture] if image else text
        self.given.append(HumanMessage(content))
        self.seen("user", text + self.image(image))

    def late(self, text: str) -> None:
        self.given.append(SystemMessage(text))
        self.seen("system", text)

    def results(self, texts: Sequence[str], *, image: bool = False) -> None:
        for text in texts:
            self.returned.append([{"type": "text", "text": text}, self.picture] if image else text)
            self.seen("tool", text + self.image(image))

    def ask(self, *, stream: bool) -> None:
        given: Any = {"messages": self.given} if self.given else None
        try:
            if stream:
                for _ in self.graph.stream(given, self.config, stream_mode="messages"):
                    pass
            else:
                self.graph.invoke(given, self.config)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            raise Overflow from error
        self.given = []
        answer = self.graph.get_state(self.config).values["messages"][-1]
        assert isinstance(answer, AIMessage)
        self.made = [Made(str(one["id"]), one["name"], one["args"]) for one in answer.tool_calls]
        self.seen("assistant", answer.text, self.made)

    def abort(self) -> str:
        events = self.graph.stream({"messages": self.given}, self.config, stream_mode="messages")
        partial = next(chunk.text for chunk, _ in events if chunk.text)
        events.close()
        self.given = [AIMessage(partial)]
        self.seen("assistant", partial)
        return partial

    def compact(self, summary: str) -> None:
        del self.read[self.first :]
        self.given = [RemoveMessage(id=REMOVE_ALL_MESSAGES), SystemMessage(SYSTEM)]
        self.user(summary)
