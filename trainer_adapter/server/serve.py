"""Runs the application in uvicorn: until it is told to end, or in a thread beside a program that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from longtail.trainer_adapter.server.config import ServerConfig
from longtail.trainer_adapter.server.protocol import Service

MISSING = "the server needs starlette and uvicorn: pip install 'longtail[serve]'"
LAST_SECONDS = 10.0
"""After the grace time, for answers to be sent."""


def _server(service: Service, config: ServerConfig, tokenizer: Any, about: Mapping[str, Any] | None) -> Any:
    try:
        import uvicorn

        from longtail.trainer_adapter.server.app import make_app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("uvicorn", "starlette"):
            raise
        raise ValueError(MISSING) from error

    class Server(uvicorn.Server):
        """At its end it takes nothing more in, lets requests finish for the grace time, and ends those that are left as
        an abort does: their clients get what they have."""

        def __init__(self) -> None:
            app = make_app(service, config, tokenizer=tokenizer, about=about)
            super().__init__(
                uvicorn.Config(
                    app,
                    host=config.host,
                    port=config.port,
                    log_level="warning",
                    access_log=False,
                    server_header=False,
                    ws="none",
                    timeout_keep_alive=75,  # clients keep connections longer than uvicorn's five seconds
                    timeout_graceful_shutdown=int(config.grace_seconds + LAST_SECONDS) + 1,
                )
            )
            self.is_up = threading.Event()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.is_up.set()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            abort = asyncio.ensure_future(self._abort())
            try:
                await super().shutdown(sockets)
            finally:
                abort.cancel()

        async def _abort(self) -> None:
            await asyncio.sleep(config.grace_seconds)
            await asyncio.wrap_future(service.abort_all())

        @property
        def address(self) -> tuple[str, int]:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            return host, port

    return Server()


def serve(
    service: Service,
    config: ServerConfig | None = None,
    *,
    tokenizer: Any = None,
    about: Mapping[str, Any] | None = None,
    started: Callable[[str], object] = lambda url: None,
) -> None:
    """Until SIGINT, which is a KeyboardInterrupt as ever, or SIGTERM, after which it returns, or calls the handler that
    the caller has for it (in the main thread; in others no signal is seen). service: stays the caller's. started: told
    the address when requests are taken; what it raises ends the server.
    ValueError if starlette or uvicorn is not installed; OSError if the address cannot be bound to."""
    config = ServerConfig() if config is None else config
    server = _server(service, config, tokenizer, about)

    async def run() -> None:
        async def tell() -> None:
            await asyncio.to_thread(server.is_up.wait)
            try:
                if server.started:
                    started(url_of(*server.address))
            except BaseException:
                server.should_exit = True
                raise

        telling = asyncio.ensure_future(tell())
        try:
            await server.serve(sockets=[bound(config.host, config.port, config.send_seconds)])
        finally:
            server.is_up.set()
            telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling

    with _terminated(server):
        asyncio.run(run())


@contextlib.contextmanager
def _terminated(server: Any) -> Iterator[None]:
    """SIGTERM ends the server, not the process: uvicorn, once it has ended, hands a signal to whoever had it before,
    and by default the caller would die there with everything open."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        server.should_exit = True

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def serving(
    service: Service,
    config: ServerConfig | None = None,
    *,
    tokenizer: Any = None,
    about: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """The same in a thread, while the block runs. -> http://host:port."""
    config = ServerConfig() if config is None else config
    server = _server(service, config, tokenizer, about)
    listening = bound(config.host, config.port, config.send_seconds)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), name="longtail-server", daemon=True)
    thread.start()
    try:
        server.is_up.wait()
        yield url_of(*listening.getsockname()[:2])
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def bound(host: str, port: int, send_seconds: float = 0.0) -> socket.socket:
    """send_seconds: after which the kernel ends a connection whose client takes nothing in, with all that was written
    to it: what an application has handed over it cannot take back. 0: never. OSError says which address it is that
    cannot be bound to."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if send_seconds and hasattr(socket, "TCP_USER_TIMEOUT"):  # which connections inherit
            milliseconds = min(max(int(send_seconds * 1000), 1), 2**31 - 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listening


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
