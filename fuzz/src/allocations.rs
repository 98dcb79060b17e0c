//! Requests during which one allocation fails, for each allocation of their way.
//!
//! An allocation whose failure the code handles gives an error response. One whose failure it does
//! not handle ends the process, so every request runs in a child, which is started again behind
//! the allocation that ended it. The parent counts both.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;

use api::proto;
use flate2::Compression;
use flate2::write::GzEncoder;
use model::HostMemory;
use prost::Message;
use server::AccessOptions;

use crate::allocator;
use crate::protobuf::{Field, write};
use crate::targets::{ModelHarness, RestHarness, frame, http_request};

/// Requests whose allocations fail.
pub const CASES: [&str; 7] =
    ["register", "json", "binary", "gzip", "grpc", "grpc_contents", "classify"];

/// Allocations of at least this size must be able to fail. Buffers of the transport are smaller:
/// HTTP/1 has pieces of 408 KiB, of which the reader of forms joins two.
pub const LARGE: usize = 1 << 20;

/// Rows and columns of the tensors: each has 2 MiB, the weight 1 MiB.
const ROWS: usize = 1024;
const COLUMNS: usize = 512;

/// What came of the failures of one case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocationReport {
    /// Allocations of the request's way.
    pub allocations: u64,
    /// Failures that gave an error response.
    pub refused: u64,
    /// Failures after which the request was served anyway, or its connection was closed.
    pub survived: u64,
    /// Sizes of the allocations whose failure ended the process.
    pub aborts: Vec<u64>,
    /// Other ends of the process, in words.
    pub faults: Vec<String>,
}

fn text(number: u64, text: &str) -> Field {
    Field::Bytes(number, text.as_bytes().to_vec())
}

fn dims(dims: &[u64]) -> Field {
    let dims = dims.iter().map(|&dim| Field::Message(1, vec![Field::Varint(1, dim)]));
    Field::Message(2, dims.collect())
}

fn value(number: u64, name: &str, shape: &[u64]) -> Field {
    let tensor = Field::Message(1, vec![Field::Varint(1, 1), dims(shape)]);
    Field::Message(number, vec![text(1, name), Field::Message(2, vec![tensor])])
}

fn node(operator: &str, inputs: &[&str], output: &str) -> Field {
    let mut fields: Vec<Field> = inputs.iter().map(|name| text(1, name)).collect();
    fields.extend([text(2, output), text(4, operator)]);
    Field::Message(1, fields)
}

fn model(graph: Vec<Field>) -> Vec<u8> {
    let opset = vec![text(1, ""), Field::Varint(2, 17)];
    let mut bytes = Vec::new();
    let fields = [Field::Varint(1, 8), Field::Message(7, graph), Field::Message(8, opset)];
    write(&fields, &mut bytes);
    bytes
}

/// A product with a weight, and a rectifier.
fn product_model() -> Vec<u8> {
    let (rows, columns) = (ROWS as u64, COLUMNS as u64);
    let raw: Vec<u8> = (0..COLUMNS * COLUMNS).flat_map(|_| 0.01f32.to_le_bytes()).collect();
    let sizes = [Field::Varint(1, columns), Field::Varint(1, columns), Field::Varint(2, 1)];
    let weight = sizes.into_iter().chain([text(8, "w"), Field::Bytes(9, raw)]).collect();
    model(vec![
        node("MatMul", &["x", "w"], "p"),
        node("Relu", &["p"], "y"),
        text(2, "g"),
        Field::Message(5, weight),
        value(11, "x", &[rows, columns]),
        value(12, "y", &[rows, columns]),
    ])
}

/// Scores from the mean of each channel of a picture.
fn picture_model() -> Vec<u8> {
    model(vec![
        node("GlobalAveragePool", &["x"], "m"),
        node("Flatten", &["m"], "y"),
        text(2, "g"),
        value(11, "x", &[1, 3, 640, 640]),
        value(12, "y", &[1, 3]),
    ])
}

fn form(name: &str, file_field: &str, file: &[u8]) -> Vec<u8> {
    let part = "--X\r\ncontent-disposition: form-data; name=";
    let head =
        format!("{part}\"name\"\r\n\r\n{name}\r\n{part}\"{file_field}\"; filename=\"f\"\r\n\r\n");
    [head.as_bytes(), file, b"\r\n--X--\r\n"].concat()
}

const FORM: &str = "content-type: multipart/form-data; boundary=X\r\n";
const INFER: &str = "/v2/models/m/infer";
const CALL: &str = "/inference.GRPCInferenceService/ModelInfer";

fn json_body() -> Vec<u8> {
    let values: Vec<String> = (0..ROWS * COLUMNS).map(|at| format!("{}.5", at % 100)).collect();
    let data = values.join(",");
    format!(
        "{{\"inputs\":[{{\"name\":\"x\",\"shape\":[{ROWS},{COLUMNS}],\"datatype\":\"FP32\",\
         \"data\":[{data}]}}]}}"
    )
    .into_bytes()
}

fn binary_request() -> Vec<u8> {
    let bytes = 4 * ROWS * COLUMNS;
    let json = format!(
        "{{\"inputs\":[{{\"name\":\"x\",\"shape\":[{ROWS},{COLUMNS}],\"datatype\":\"FP32\",\
         \"parameters\":{{\"binary_data_size\":{bytes}}}}}],\
         \"parameters\":{{\"binary_data_output\":true}}}}"
    );
    let headers = format!("inference-header-content-length: {}\r\n", json.len());
    let body = [json.as_bytes(), &vec![0; bytes]].concat();
    http_request("POST", INFER, &headers, &body)
}

fn gzip_request() -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let _ = encoder.write_all(&json_body());
    let body = encoder.finish().unwrap_or_default();
    http_request("POST", INFER, "content-encoding: gzip\r\naccept-encoding: gzip\r\n", &body)
}

fn grpc_body(raw: bool) -> Vec<u8> {
    let values = vec![0.5f32; ROWS * COLUMNS];
    let mut message = proto::ModelInferRequest { model_name: "m".into(), ..Default::default() };
    let mut contents = None;
    match raw {
        true => message.raw_input_contents.push(vec![0; 4 * values.len()].into()),
        false => {
            let fp32_contents = values;
            contents = Some(proto::InferTensorContents { fp32_contents, ..Default::default() });
        }
    }
    message.inputs.push(proto::model_infer_request::InferInputTensor {
        name: "x".into(),
        datatype: "FP32".into(),
        shape: vec![ROWS as i64, COLUMNS as i64],
        contents,
        ..Default::default()
    });
    let mut body = Vec::new();
    frame(0, &message.encode_to_vec(), &mut body);
    body
}

/// Sends the request of a case; whether it was served.
type Exchange = Box<dyn FnMut(&mut RestHarness) -> Option<bool>>;

fn is_ok(status: Option<u16>) -> Option<bool> {
    status.map(|status| status == 200)
}

fn exchange(case: &str) -> Exchange {
    let http = |request: Vec<u8>| -> Exchange { Box::new(move |s| is_ok(s.send(&request))) };
    let grpc = |body: Vec<u8>| -> Exchange {
        Box::new(move |server| server.call(CALL, "identity", &body))
    };
    match case {
        "register" => http(registration("m2", &product_model())),
        "json" => http(http_request("POST", INFER, "", &json_body())),
        "binary" => http(binary_request()),
        "gzip" => http(gzip_request()),
        "grpc" => grpc(grpc_body(true)),
        "grpc_contents" => grpc(grpc_body(false)),
        _ => {
            let picture = include_bytes!("../corpus/picture/photo.png");
            http(http_request("POST", "/classify", FORM, &form("p", "image", picture)))
        }
    }
}

fn registration(name: &str, onnx: &[u8]) -> Vec<u8> {
    http_request("POST", "/register", FORM, &form(name, "model", onnx))
}

/// A server with the models that the cases use.
fn server() -> RestHarness {
    let (node, folder) = ModelHarness::start().into_service();
    let service = Arc::new(node);
    let access = AccessOptions::default();
    let mut server = RestHarness::start(service, HostMemory::process(), access, folder);
    assert_eq!(server.send(&registration("m", &product_model())), Some(200));
    assert_eq!(server.send(&registration("p", &picture_model())), Some(200));
    server
}

/// Runs a case in this process: for each allocation of at least `min` bytes from number `from` on,
/// once with this allocation failing. Prints what comes of each.
pub fn run_child(case: &str, from: u64, min: usize) {
    let mut server = server();
    let mut exchange = exchange(case);
    // Twice, so that what is allocated once for all is there.
    for _ in 0..2 {
        assert_eq!(exchange(&mut server), Some(true), "{case} is not served");
    }
    for number in from.. {
        println!("at {number}");
        allocator::fail_at(number, min);
        let served = exchange(&mut server);
        let failed = allocator::disarm();
        let Some(size) = failed else {
            println!("end {number}");
            return;
        };
        println!("{} {size}", if served == Some(false) { "refused" } else { "survived" });
        // The connection may be closed; a new one must be served.
        let again = (0..3).any(|_| exchange(&mut server) == Some(true));
        assert!(again, "{case} is not served after allocation {number} of {size} bytes failed");
    }
}

/// Runs a case in child processes until each allocation has failed once.
pub fn run_case(program: &std::path::Path, case: &str, min: usize) -> AllocationReport {
    let mut report = AllocationReport::default();
    let mut from = 0;
    loop {
        let mut child = Command::new(program)
            .args(["allocations-child", case, &from.to_string(), &min.to_string()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the driver can be started");
        let out = child.stdout.take().expect("its output is a pipe");
        let mut last = from;
        let mut ended = false;
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let (word, number) = line.split_once(' ').unwrap_or_default();
            let number: u64 = number.parse().unwrap_or_default();
            match word {
                "at" => last = number,
                "refused" => report.refused += 1,
                "survived" => report.survived += 1,
                "end" => (report.allocations, ended) = (number, true),
                _ => {}
            }
        }
        let output = child.wait_with_output().expect("the child ends");
        if ended {
            return report;
        }
        let text = String::from_utf8_lossy(&output.stderr);
        let size = text.lines().rev().find_map(|line| {
            line.strip_prefix("memory allocation of ")?.split(' ').next()?.parse().ok()
        });
        match size {
            Some(size) => report.aborts.push(size),
            None => {
                let why = text.lines().last().unwrap_or_default();
                report.faults.push(format!("allocation {last}: {}: {why}", output.status));
            }
        }
        if report.faults.len() > 4 {
            return report;
        }
        from = last + 1;
    }
}
