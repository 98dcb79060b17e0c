use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use clap::Parser;
use planner::traffic::WindowRate;

use super::*;
use crate::args::{Cli, Command};

fn args(more: &[&str]) -> PlanArgs {
    let given = ["atoll", "plan", "--services", "s", "--profiles", "p", "--prometheus", "http://h"];
    let given = given.iter().chain(more);
    match Cli::try_parse_from(given).unwrap().command {
        Command::Plan(args) => args,
        _ => unreachable!("the words above say plan"),
    }
}

/// How the server answers a request.
type Answer = Box<dyn FnOnce(&mut TcpStream) + Send>;

/// A server on this machine that gives every connection the next of these answers, and reports the
/// heads of the requests.
fn server(answers: Vec<Answer>) -> (String, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/prefix/", listener.local_addr().unwrap());
    let (send, heads) = channel();
    thread::spawn(move || {
        for answer in answers {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let mut head = String::new();
            let mut lines = BufReader::new(stream.try_clone().unwrap());
            while lines.read_line(&mut head).is_ok_and(|bytes| bytes > 2) {}
            let _ = send.send(head);
            answer(&mut stream);
        }
    });
    (address, heads)
}

fn reply(status: &str, more: &str, body: &str) -> Answer {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n{more}\r\n",
        body.len()
    );
    let text = head + body;
    Box::new(move |stream| {
        let _ = stream.write_all(text.as_bytes());
    })
}

/// As Prometheus 2.42 writes it.
fn matrix(values: &str) -> String {
    let series = format!(r#"{{"metric":{{"model":"a"}},"values":[{values}]}}"#);
    format!(r#"{{"status":"success","data":{{"resultType":"matrix","result":[{series}]}}}}"#)
}

const QUERY: [&str; 4] = ["--query", "sum by (model) (rate(x[5m]))", "--service-label", "model"];

#[test]
fn a_long_range_is_asked_for_in_parts() {
    let answers = vec![
        reply("200 OK", "", &matrix(r#"[1000,"5"],[1990,"9"]"#)),
        reply("200 OK", "", &matrix(r#"[11000,"7.5"]"#)),
        reply("200 OK", "", &matrix(r#"[25000,"1"]"#)),
    ];
    let (address, heads) = server(answers);
    let token = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(token.path(), "secret\n").unwrap();
    let token = token.path().display().to_string();
    let times = ["--start", "1000", "--end", "1970-01-01T06:59:59", "--step-s", "10"];
    let file = ["--prometheus-token-file", &token];
    let args = args(&[&QUERY[..], &times, &file].concat());
    let traffic = read(&args, &address).unwrap();
    let windows = traffic.windows(10_000, false, WindowRate::Peak).unwrap();
    let peaks: Vec<f64> = windows.iter().map(|window| window.rates[0]).collect();
    assert_eq!(peaks, [9.0, 7.5, 1.0]);
    let heads: Vec<String> = heads.iter().collect();
    let ranges = [(1000, 10_990), (11_000, 20_990), (21_000, 25_199)];
    for (head, (start, end)) in heads.iter().zip(ranges) {
        let line = head.lines().next().unwrap();
        assert!(
            line.starts_with("GET /prefix/api/v1/query_range?query=sum+by+%28model%29"),
            "{line}"
        );
        assert!(line.contains(&format!("&start={start}&end={end}&step=10 ")), "{line}");
        assert!(head.contains("authorization: Bearer secret"), "{head}");
    }
    assert_eq!(heads.len(), 3);
}

#[test]
fn failures_name_address_query_and_remedy() {
    let bad = r#"{"status":"error","errorType":"bad_data","error":"invalid parameter \"query\""}"#;
    let late = r#"{"status":"error","errorType":"timeout","error":"query timed out"}"#;
    let endless = |stream: &mut TcpStream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
        let some = vec![b' '; 1 << 20];
        while stream.write_all(&some).is_ok() {}
    };
    let claims = |stream: &mut TcpStream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n");
    };
    let silent = |_: &mut TcpStream| thread::sleep(Duration::from_secs(2));
    let other = |stream: &mut TcpStream| {
        let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n");
    };
    let cases: Vec<(Answer, u8, &str)> = vec![
        (reply("400 Bad Request", "", bad), 2, "invalid parameter"),
        (reply("503 Service Unavailable", "", late), 1, "query timed out (timeout)"),
        (reply("503 Service Unavailable", "", "busy"), 1, "HTTP 503: busy"),
        (reply("401 Unauthorized", "", "no"), 1, "--prometheus-token-file"),
        (reply("404 Not Found", "", "no"), 1, "address of a Prometheus server"),
        (reply("302 Found", "Location: /login\r\n", ""), 1, "redirects to /login"),
        (reply("200 OK", "", "<html></html>"), 2, "no answer of query_range"),
        (reply("200 OK", "", &matrix("")), 2, "no samples from 1000 to 2000"),
        (Box::new(endless), 2, "more than 64 MiB"),
        (Box::new(claims), 2, "more than 64 MiB"),
        (Box::new(silent), 1, "--step-s"),
        (Box::new(other), 1, "is this its address"),
    ];
    let times = ["--start", "1000", "--end", "2000", "--prometheus-timeout-secs", "1"];
    let args = args(&[&QUERY[..], &times].concat());
    for (answer, code, what) in cases {
        let (address, _heads) = server(vec![answer]);
        let failure = read(&args, &address).unwrap_err();
        let message = failure.message();
        assert!(message.contains(what), "{message}");
        assert!(message.contains("/prefix/api/v1/query_range, query 'sum by"), "{message}");
        assert_eq!(failure.report(), code, "{message}");
    }
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let failure = read(&args, &format!("http://{gone}")).unwrap_err();
    assert!(failure.message().contains("is the server up"), "{}", failure.message());
}

#[test]
fn flags_that_make_no_range_are_refused() {
    let refused = |more: &[&str], server: &str| {
        let args = args(more);
        let failure = range(&args, server, 5_000_000).unwrap_err();
        assert_eq!(failure.report(), 2);
        failure.message().to_string()
    };
    let with = |more: &[&str]| refused(&[&QUERY[..], more].concat(), "http://h");
    assert!(with(&["--start", "soon"]).contains("--start 'soon'"));
    assert!(with(&["--start", "9", "--end", "5"]).contains("after --end"));
    assert!(with(&["--start", "0", "--step-s", "1"]).contains("--step-s"));
    assert!(refused(&["--query", " "], "http://h").contains("--prometheus needs --query"));
    let long = "x".repeat(QUERY_BYTES_MAX + 1);
    assert!(refused(&["--query", &long], "http://h").contains("recording rule"));
    for (server, what) in [
        ("host:9090", "http or https"),
        ("ftp://h", "http or https"),
        ("nothing", "give http://HOST:9090"),
        ("http://h/graph?g0.expr=up", "has a query"),
        ("http://me:secret@h", "--prometheus-token-file"),
    ] {
        let message = refused(&QUERY, server);
        assert!(message.contains(what) && !message.contains("secret"), "{message}");
    }
    let args = args(&QUERY);
    let range = range(&args, "https://h/p", 5_000_000).unwrap();
    assert_eq!((range.start_s, range.end_s), (5_000_000 - 7 * DAY_S, 5_000_000));
    assert_eq!(range.url.as_str(), "https://h/p/api/v1/query_range");
}
