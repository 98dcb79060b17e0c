//! Accepts HTTP connections and serves them until stopped.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use api::ApiError;
use axum::Router;
use axum::body::Body;
use futures_util::FutureExt;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tower::Service;

use crate::rest::response::{self, ResponseBody};

/// Timeout for a complete request head.
const IDLE_LIMIT: Duration = Duration::from_secs(600);

/// Serves `responder` on `listener` until `stop` turns true, then lets connections finish their
/// requests. Dropping the future closes them immediately.
pub(crate) async fn serve(
    listener: TcpListener,
    responder: impl Respond,
    max_connections: usize,
    mut stop: watch::Receiver<bool>,
) {
    let permits = Arc::new(Semaphore::new(max_connections));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            accepted = accept(&listener, &permits) => accepted,
            Some(_) = connections.join_next() => continue,
        };
        if let Some((stream, permit)) = accepted {
            let (responder, stop) = (responder.clone(), stop.clone());
            connections.spawn(async move {
                serve_connection(stream, responder, stop).await;
                drop(permit);
            });
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Returns when `stop` turns true or its sender is dropped.
pub(crate) async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let permit = permits.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            // Without this a response can wait for the client's delayed acknowledgement.
            let _ = stream.set_nodelay(true);
            Some((stream, permit))
        }
        Err(error) => {
            // Usually out of file descriptors: wait until others are closed.
            tracing::warn!(%error, "cannot accept connection");
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    responder: impl Respond,
    mut stop: watch::Receiver<bool>,
) {
    let service = service_fn(move |request: Request<Incoming>| respond(responder.clone(), request));
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE_LIMIT);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(1024);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "connection closed early");
    }
}

/// Responds to the requests of a connection.
pub(crate) trait Respond: Clone + Send + Sync + 'static {
    fn respond(
        &self,
        request: Request<Incoming>,
    ) -> impl Future<Output = Response<ResponseBody>> + Send;
}

impl Respond for Router {
    async fn respond(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        match self.clone().call(request.map(Body::new)).await {
            Ok(response) => response.map(ResponseBody::Routed),
            Err(never) => match never {},
        }
    }
}

/// Handles one request. A panic becomes an error response, not a closed connection.
async fn respond(
    responder: impl Respond,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    let response = AssertUnwindSafe(responder.respond(request)).catch_unwind().await;
    Ok(response.unwrap_or_else(|_| {
        response::error(&ApiError::internal("the server failed on this request"))
            .map(ResponseBody::Routed)
    }))
}
