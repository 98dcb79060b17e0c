//! Executes a query request stage by stage.
//!
//! A stage starts when the outputs it reads are complete, so branches run concurrently. What one
//! reply yields for the next stage is sent together, in requests of up to the stage's batch. The
//! first failure is the reply to the query request, and what is still in flight for it is
//! cancelled.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use api::error::ApiResult;
use api::{
    ApiError, CanaryChoice, ErrorKind, InferOptions, InferRequest, InferResponse, Inputs, ModelRef,
    NamedTensor, RequestContext, RequestedOutput, TraceContext,
};
use base::Nanos;
use bytes::Bytes;
use futures_util::future::try_join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use model::{DataType, HostMemory, Tensor};

use super::Inner;
use super::routing_table::{QueryEntry, RoutingTable};
use crate::query::picture::{Corners, Picture};
use crate::query::region::{self, RegionRules};
use crate::query::spec::{Checked, ELEMENTS_MAX, Each, Feed, Reference};
use crate::query::{rows, text};

/// Tensors by name.
type Values = BTreeMap<String, Tensor>;

/// The outputs of a stage.
#[derive(Debug, Default)]
struct StageOutputs {
    /// For a stage that fans out: the element of the next outer fan-out to which each of its
    /// elements belongs.
    above: Vec<usize>,
    /// Outputs of the model and of the stage itself, by element.
    values: Vec<Values>,
}

/// The inputs of a stage's requests, by element.
#[derive(Default)]
struct StageRequests {
    above: Vec<usize>,
    inputs: Vec<Values>,
    /// Rectangles that the elements are cropped from, where they are.
    regions: Vec<Corners>,
}

/// A query request, as stages read it. Shared with threads that prepare pictures.
struct QueryRequest {
    query: Arc<Checked>,
    inputs: HashMap<String, Tensor>,
    pictures: HashMap<String, Picture>,
    options: InferOptions,
}

type StageResults = Vec<Option<Arc<StageOutputs>>>;

impl Inner {
    pub(super) async fn infer_query(
        &self,
        name: &str,
        request: InferRequest,
        context: RequestContext,
    ) -> ApiResult<InferResponse> {
        // All requests of one query request to a model get the same version.
        let canary = match context.canary {
            CanaryChoice::ByShare => CanaryChoice::ByKey(self.unit().to_bits()),
            choice => choice,
        };
        let context = RequestContext { canary, ..context };
        let arrived = self.clock.now();
        let table = self.table();
        let entry = table.query(name)?;
        entry.meter.requests.arrive(1);
        let objective = Nanos((entry.query.spec.slo_ms * 1e6) as u64);
        let reply =
            self.execute_query(name, request, (arrived, objective), &table, entry, context).await;
        match &reply {
            Ok(_) => {
                entry.meter.requests.answer(self.clock.now() - arrived, Some(objective), 1);
            }
            Err(error) if super::is_refusal(error.kind) => entry.meter.requests.refuse(1),
            Err(_) => {}
        }
        reply
    }

    async fn execute_query(
        &self,
        name: &str,
        request: InferRequest,
        (arrived, objective): (Nanos, Nanos),
        table: &RoutingTable,
        entry: &QueryEntry,
        context: RequestContext,
    ) -> ApiResult<InferResponse> {
        let _inside = self.enter()?;
        let query = &entry.query;
        // A request that a later stage cannot serve is not started. Where backends are scaled to
        // zero it waits for all of them.
        let own = request.options.timeout;
        let awake = self.wait_for_stages(table, query, context.canary, (arrived, own)).await?;
        let waited = awake.as_ref().map_or(Nanos::ZERO, |_| self.clock.now() - arrived);
        let table = awake.as_deref().unwrap_or(table);
        // The query's objective is about serving, not about starting backends.
        let deadline = arrived + own.unwrap_or(objective + waited);
        let (id, requested) = (request.id.clone(), request.outputs.clone());
        let query_request = Arc::new(prepare(query.clone(), request, self.settings.memory).await?);
        let execution =
            QueryExecution { inner: self, table, entry, query_request, deadline, name, context };
        let (done, in_stages) = execution.run().await?;
        let now = self.clock.now();
        entry.meter.complete((now - arrived).since(in_stages).since(waited));
        if awake.is_some() {
            query.spec.stages.iter().for_each(|stage| self.note_answered(now, &stage.model));
        }
        let outputs = collect_outputs(query, &done, &requested)?;
        let (model_name, model_version) = (name.into(), "1".into());
        Ok(InferResponse { model_name, model_version, id, outputs, timing: None })
    }

    /// Waits until backends have the models of all stages; `None` where they have.
    async fn wait_for_stages(
        &self,
        table: &RoutingTable,
        query: &Checked,
        choice: CanaryChoice,
        (arrived, own): (Nanos, Option<Nanos>),
    ) -> ApiResult<Option<Arc<RoutingTable>>> {
        let models =
            || query.spec.stages.iter().map(|stage| ModelRef { name: &stage.model, version: None });
        let mut all_served = true;
        for model in models() {
            match table.serving(model) {
                Ok(_) => {}
                Err(_) if self.can_wait(table, model) => all_served = false,
                Err(error) => return Err(error),
            }
        }
        if all_served {
            return Ok(None);
        }
        try_join_all(models().map(|model| self.wait_for_choice(model, choice, arrived, own)))
            .await?;
        let table = self.table();
        for model in models() {
            table.serving(model)?;
        }
        Ok(Some(table))
    }
}

/// Checks the inputs and decodes pictures, outside of the threads that serve connections.
async fn prepare(
    query: Arc<Checked>,
    request: InferRequest,
    memory: &'static HostMemory,
) -> ApiResult<QueryRequest> {
    let with_query_name = match request.inputs {
        Inputs::Named(tensors) => tensors,
        Inputs::Raw(bytes) => vec![only_input(&query, bytes)?],
    };
    let mut inputs: HashMap<String, Tensor> =
        with_query_name.into_iter().map(|input| (input.name.to_string(), input.tensor)).collect();
    if let Some(unknown) = inputs.keys().find(|name| !query.inputs.contains(*name)) {
        return Err(ApiError::invalid(format!("the query has no input '{unknown}'")));
    }
    if let Some(missing) = query.inputs.iter().find(|name| !inputs.contains_key(*name)) {
        return Err(ApiError::invalid(format!("the query's input '{missing}' is missing")));
    }
    let mut names: Vec<String> = Vec::new();
    for feed in query.spec.stages.iter().flat_map(|stage| stage.inputs.values()) {
        if let Feed::Picture(picture) = feed
            && !names.contains(&picture.of)
        {
            names.push(picture.of.clone());
        }
    }
    let mut options = request.options;
    options.class = options.class.or(query.spec.class);
    let mut pictures = HashMap::new();
    for name in names {
        let tensor = inputs.remove(&name);
        let missing = || ApiError::invalid(format!("the query's input '{name}' is missing"));
        let tensor = tensor.ok_or_else(missing)?;
        let title = name.clone();
        let picture = run_blocking(move || Picture::of(&title, &tensor, memory)).await?;
        pictures.insert(name, picture);
    }
    Ok(QueryRequest { query, inputs, pictures, options })
}

/// A raw body is the picture of a query that has no other input.
fn only_input(query: &Checked, bytes: Bytes) -> ApiResult<NamedTensor> {
    let mut names = query.inputs.iter();
    match (names.next(), names.next()) {
        (Some(name), None) => Ok(NamedTensor {
            name: name.as_str().into(),
            tensor: Tensor::from_strings(vec![1], vec![bytes])?,
        }),
        _ => Err(ApiError::invalid(format!(
            "a raw body needs a query with one input, this one has {}",
            query.inputs.len()
        ))),
    }
}

/// Runs CPU work on a thread that may block.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(ApiError::internal("work between two stages failed")))
}

/// The execution of one query request.
struct QueryExecution<'a> {
    inner: &'a Inner,
    table: &'a RoutingTable,
    entry: &'a QueryEntry,
    query_request: Arc<QueryRequest>,
    deadline: Nanos,
    name: &'a str,
    context: RequestContext,
}

impl QueryExecution<'_> {
    /// Executes all stages. Returns their outputs, and the time during which at least one model
    /// ran.
    async fn run(&self) -> ApiResult<(StageResults, Nanos)> {
        let query = &self.query_request.query;
        let count = query.spec.stages.len();
        let mut done: StageResults = vec![None; count];
        let mut started = vec![false; count];
        let mut running = FuturesUnordered::new();
        let mut spans: Vec<(Nanos, Nanos)> = Vec::with_capacity(count);
        loop {
            for (stage, started) in started.iter_mut().enumerate() {
                let ready = query.parents[stage].iter().all(|&parent| done[parent].is_some());
                if ready && !*started {
                    *started = true;
                    running.push(self.stage(stage, done.clone()));
                }
            }
            let Some(ended) = running.next().await else { break };
            let (stage, outputs, span) = ended.map_err(|error| self.with_query_name(error))?;
            done[stage] = Some(Arc::new(outputs));
            spans.push(span);
        }
        Ok((done, covered_time(spans)))
    }

    fn with_query_name(&self, error: ApiError) -> ApiError {
        let message = format!("query '{}': {}", self.name, error.message);
        ApiError { message: message.into(), ..error }
    }

    /// Runs a stage, as a span of its own where the trace is recorded.
    async fn stage(
        &self,
        stage: usize,
        done: StageResults,
    ) -> ApiResult<(usize, StageOutputs, (Nanos, Nanos))> {
        let spec = &self.query_request.query.spec.stages[stage];
        let trace = self.context.trace;
        let recorded = trace.filter(|_| self.context.is_recorded).zip(self.inner.spans.get());
        let mut span = recorded.map(|(own, sink)| sink.begin_stage(own, &spec.name, &spec.model));
        let trace = span.as_ref().map_or(trace, |span| Some(span.context()));
        let result = self.run_stage(stage, done, trace).await;
        if let Some(span) = &mut span {
            span.finish(result.as_ref().map(|_| ()));
        }
        result
    }

    async fn run_stage(
        &self,
        stage: usize,
        done: StageResults,
        trace: Option<TraceContext>,
    ) -> ApiResult<(usize, StageOutputs, (Nanos, Nanos))> {
        let query_request = self.query_request.clone();
        let spec = &query_request.query.spec.stages[stage];
        let pictures = spec.inputs.values().any(|feed| matches!(feed, Feed::Picture(_)));
        let mut requests = match pictures || spec.each.is_some() {
            true => {
                let (query_request, done) = (query_request.clone(), done.clone());
                run_blocking(move || query_request.requests(stage, &done)).await?
            }
            false => query_request.requests(stage, &done)?,
        };
        let started = self.inner.clock.now();
        let mut values = self.call_all(stage, &requests.inputs, trace).await?;
        let turned = self.read_turned(stage, &done, &mut requests, &mut values, trace).await?;
        let ended = self.inner.clock.now();
        let count = (requests.inputs.len() + turned) as u64;
        self.entry.meter.stage(stage, count, ended - started);
        for (value, corners) in values.iter_mut().zip(&requests.regions) {
            let flat: Vec<f32> = corners.iter().flatten().copied().collect();
            value.insert("region".to_string(), Tensor::from_vec(vec![1, 4, 2], flat)?);
        }
        Ok((stage, StageOutputs { above: requests.above, values }, (started, ended)))
    }

    /// Reads texts with a low score upside down as well, where the query wants that: a rectangle
    /// says along which line a text runs, and not in which direction. Returns how many it read.
    async fn read_turned(
        &self,
        stage: usize,
        done: &StageResults,
        requests: &mut StageRequests,
        values: &mut [Values],
        trace: Option<TraceContext>,
    ) -> ApiResult<usize> {
        let query_request = self.query_request.clone();
        let Some(least) = query_request.query.spec.stages[stage].turn_below else { return Ok(0) };
        let low: Vec<usize> =
            (0..values.len()).filter(|&element| score_of(&values[element]) < least).collect();
        if low.is_empty() {
            return Ok(0);
        }
        let turn = |&element: &usize| {
            let [a, b, c, d] = requests.regions[element];
            (requests.above[element], [c, d, a, b])
        };
        let turned: Vec<(usize, Corners)> = low.iter().map(turn).collect();
        let (corners, done) = (turned.clone(), done.clone());
        let prepare = move || query_request.turned_inputs(stage, &done, &corners);
        let replies = self.call_all(stage, &run_blocking(prepare).await?, trace).await?;
        for ((&element, (_, corners)), reply) in low.iter().zip(turned).zip(replies) {
            if score_of(&reply) > score_of(&values[element]) {
                (values[element], requests.regions[element]) = (reply, corners);
            }
        }
        Ok(low.len())
    }

    /// Sends all elements of a stage, in groups, and returns the outputs of each.
    async fn call_all(
        &self,
        stage: usize,
        inputs: &[Values],
        trace: Option<TraceContext>,
    ) -> ApiResult<Vec<Values>> {
        let batch = self.query_request.query.spec.stages[stage].batch;
        let groups = compatible_groups(inputs, batch);
        let calls = groups.iter().map(|group| self.call(stage, inputs, group, trace));
        let replies = try_join_all(calls).await?;
        let mut values = vec![Values::new(); inputs.len()];
        for (group, outputs) in groups.iter().zip(replies) {
            for (&element, reply) in group.iter().zip(outputs) {
                values[element] = reply;
            }
        }
        Ok(values)
    }

    /// Sends the elements of one group as one request and splits the reply again.
    async fn call(
        &self,
        stage: usize,
        inputs: &[Values],
        group: &[usize],
        trace: Option<TraceContext>,
    ) -> ApiResult<Vec<Values>> {
        let query = &self.query_request.query;
        let spec = &query.spec.stages[stage];
        let model = ModelRef { name: &spec.model, version: None };
        let entry = self.table.serving(model)?;
        let mut tensors = Vec::new();
        let mut pieces: Vec<usize> = vec![1; group.len()];
        for name in spec.inputs.keys() {
            let own: Vec<&Tensor> =
                group.iter().filter_map(|&element| inputs[element].get(name)).collect();
            pieces = own.iter().map(|tensor| rows::count(tensor)).collect();
            let tensor = rows::join(name, &own)?;
            tensors.push(NamedTensor { name: name.as_str().into(), tensor });
        }
        let needed = query.needed_outputs(stage).into_iter();
        let request = InferRequest {
            id: String::new(),
            options: InferOptions {
                timeout: Some(self.time_left(stage)?),
                binary_output: true,
                trace,
                ..self.query_request.options.clone()
            },
            inputs: Inputs::Named(tensors),
            outputs: needed.map(|name| RequestedOutput { name, classes: 0 }).collect(),
        };
        let count = group.len() as u64;
        let reply = self
            .inner
            .dispatch(model, request, count, self.table, entry, self.context.canary)
            .await?;
        let labels = &entry.record.config.labels;
        let mut values = vec![Values::new(); group.len()];
        let mut insert = |name: &str, tensor: &Tensor, pieces: &[usize]| -> ApiResult<()> {
            for (value, part) in values.iter_mut().zip(rows::part(name, tensor, pieces)?) {
                value.insert(name.to_string(), part);
            }
            Ok(())
        };
        for NamedTensor { name, tensor } in reply.outputs {
            if spec.text.as_deref() == Some(&*name) {
                let (texts, scores) = text::read(&name, &tensor, labels)?;
                insert("text", &texts, &pieces)?;
                insert("score", &scores, &pieces)?;
                continue;
            }
            insert(&name, &tensor, &pieces)?;
        }
        Ok(values)
    }

    /// Remaining time of this stage: the minimum that later stages need is reserved for them.
    fn time_left(&self, stage: usize) -> ApiResult<Nanos> {
        let name = &self.query_request.query.spec.stages[stage].name;
        let budget = self.entry.split.as_ref().and_then(|split| split.stages.get(name));
        let reserve = Nanos((budget.map_or(0.0, |budget| budget.reserve_ms) * 1e6) as u64);
        let time_left = self.deadline.since(self.inner.clock.now()).since(reserve);
        match time_left > Nanos::ZERO {
            true => Ok(time_left),
            false => {
                let message = format!("the deadline passed before stage '{name}'");
                Err(ApiError::new(ErrorKind::DeadlineExceeded, message))
            }
        }
    }
}

/// Time covered by spans that may overlap.
fn covered_time(mut spans: Vec<(Nanos, Nanos)>) -> Nanos {
    spans.sort();
    let (mut total, mut until) = (Nanos::ZERO, Nanos::ZERO);
    for (from, to) in spans {
        let from = from.max(until);
        total += to.since(from);
        until = until.max(to);
    }
    total
}

/// The score of a text; 0 without one.
fn score_of(values: &Values) -> f32 {
    let score = values.get("score").and_then(|score| score.to_vec::<f32>());
    score.and_then(|score| score.first().copied()).unwrap_or(0.0)
}

/// Elements whose inputs can be batched, in groups of at most `batch`.
fn compatible_groups(inputs: &[Values], batch: usize) -> Vec<Vec<usize>> {
    let layout = |values: &Values| -> Vec<(DataType, Vec<usize>)> {
        let tail = |tensor: &Tensor| tensor.shape().get(1..).unwrap_or_default().to_vec();
        values.values().map(|tensor| (tensor.dtype(), tail(tensor))).collect()
    };
    let mut by_layout: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (index, values) in inputs.iter().enumerate() {
        by_layout.entry(format!("{:?}", layout(values))).or_default().push(index);
    }
    by_layout
        .into_values()
        .flat_map(|all| all.chunks(batch).map(<[usize]>::to_vec).collect::<Vec<_>>())
        .collect()
}

impl QueryRequest {
    /// The requests of a stage, from the outputs that it reads.
    fn requests(&self, stage: usize, done: &StageResults) -> ApiResult<StageRequests> {
        let query = &self.query;
        let chain = &query.chains[stage];
        let fans = query.spec.stages[stage].each.is_some();
        let outer = if fans { &chain[..chain.len() - 1] } else { &chain[..] };
        let count = match outer.last() {
            Some(&fan) => done[fan].as_ref().map_or(0, |outputs| outputs.values.len()),
            None => 1,
        };
        let mut requests = StageRequests::default();
        for element in 0..count {
            let elements = self.elements(stage, done, outer, element)?;
            for (own, corners) in elements {
                let inputs = self.inputs(stage, done, outer, element, own.as_ref(), &corners)?;
                requests.inputs.push(inputs);
                if fans {
                    requests.above.push(element);
                    requests.regions.extend(corners);
                }
            }
            if requests.inputs.len() > ELEMENTS_MAX {
                return Err(ApiError::invalid(format!(
                    "stage '{}' would get more than {ELEMENTS_MAX} requests of one query request",
                    query.spec.stages[stage].name
                )));
            }
        }
        Ok(requests)
    }

    /// The elements that one element of the outer fan-out becomes: values and rectangles. Exactly
    /// one where the stage does not fan out.
    fn elements(
        &self,
        stage: usize,
        done: &StageResults,
        outer: &[usize],
        element: usize,
    ) -> ApiResult<Vec<(Option<Tensor>, Option<Corners>)>> {
        let find = |name: &str| self.value(stage, done, outer, element, name);
        match &self.query.spec.stages[stage].each {
            None => Ok(vec![(None, None)]),
            Some(Each::Rows { of, most }) => {
                let tensor = find(of)?;
                let count = tensor.shape().first().copied().ok_or_else(|| {
                    ApiError::invalid(format!("'{of}' is a single value and has no rows"))
                })?;
                let rows = match count {
                    0 => Vec::new(),
                    1 => vec![tensor],
                    _ => rows::part(of, &tensor, &vec![1; count])?,
                };
                Ok(rows.into_iter().take(*most).map(|row| (Some(row), None)).collect())
            }
            Some(Each::Boxes { of, scores, score_least, most }) => {
                let scores = scores.as_ref().map(|name| find(name)).transpose()?;
                let boxes = boxes_of(of, &find(of)?, scores.as_ref(), *score_least, *most)?;
                Ok(boxes.into_iter().map(|corners| (None, Some(corners))).collect())
            }
            Some(Each::Regions { map, threshold, score_least, grow, most }) => {
                let rules = RegionRules {
                    threshold: *threshold,
                    score_least: *score_least,
                    grow: *grow,
                    most: *most,
                };
                let regions = self.regions(stage, map, &find(map)?, &rules)?;
                Ok(regions.into_iter().map(|corners| (None, Some(corners))).collect())
            }
        }
    }

    /// Regions of a map, in pixels of the picture that the stage crops.
    fn regions(
        &self,
        stage: usize,
        name: &str,
        map: &Tensor,
        rules: &RegionRules,
    ) -> ApiResult<Vec<Corners>> {
        let (&[.., height, width], Some(values)) = (map.shape(), map.to_vec::<f32>()) else {
            return Err(ApiError::invalid(format!("'{name}' is not an FP32 map")));
        };
        if width * height != values.len() || values.is_empty() {
            return Err(ApiError::invalid(format!(
                "'{name}' has shape {:?}; a map of regions is one picture",
                map.shape()
            )));
        }
        let mut found = region::find(&values, width, height, rules);
        let feeds = self.query.spec.stages[stage].inputs.values();
        let of = feeds.filter_map(|feed| match feed {
            Feed::Picture(picture) if picture.crop => self.pictures.get(&picture.of),
            _ => None,
        });
        if let Some(picture) = of.into_iter().next() {
            let scale =
                [picture.width as f32 / width as f32, picture.height as f32 / height as f32];
            for corner in found.iter_mut().flatten() {
                *corner = [corner[0] * scale[0], corner[1] * scale[1]];
            }
        }
        Ok(found)
    }

    /// The inputs of other rectangles, each with the element of the outer fan-out that it belongs
    /// to.
    fn turned_inputs(
        &self,
        stage: usize,
        done: &StageResults,
        turned: &[(usize, Corners)],
    ) -> ApiResult<Vec<Values>> {
        let chain = &self.query.chains[stage];
        let outer = &chain[..chain.len() - 1];
        let inputs = |&(above, corners): &(usize, Corners)| {
            self.inputs(stage, done, outer, above, None, &Some(corners))
        };
        turned.iter().map(inputs).collect()
    }

    fn inputs(
        &self,
        stage: usize,
        done: &StageResults,
        outer: &[usize],
        element: usize,
        own: Option<&Tensor>,
        corners: &Option<Corners>,
    ) -> ApiResult<Values> {
        let mut values = Values::new();
        for (name, feed) in &self.query.spec.stages[stage].inputs {
            let tensor = match feed {
                Feed::Value(from) if from == "each" => {
                    own.cloned().ok_or_else(|| ApiError::internal("a stage has no value"))?
                }
                Feed::Value(from) => self.value(stage, done, outer, element, from)?,
                Feed::Picture(feed) => {
                    let picture = self.pictures.get(&feed.of);
                    let missing = || ApiError::internal(format!("no picture '{}'", feed.of));
                    let picture = picture.ok_or_else(missing)?;
                    let whole = picture.whole();
                    let view = corners.as_ref().filter(|_| feed.crop).unwrap_or(&whole);
                    picture.tensor(view, feed)?
                }
            };
            values.insert(name.clone(), tensor);
        }
        Ok(values)
    }

    /// The value called `name`, for element `element` of the fan-out `outer`.
    fn value(
        &self,
        stage: usize,
        done: &StageResults,
        outer: &[usize],
        element: usize,
        name: &str,
    ) -> ApiResult<Tensor> {
        let missing = || ApiError::invalid(format!("there is no value '{name}'"));
        match self.query.spec.reference(stage, name) {
            Ok(Reference::Input(input)) => self.inputs.get(input).cloned().ok_or_else(missing),
            Ok(Reference::Output(from, output)) => {
                let target = self.query.chains[from].len();
                let mut at = element;
                for &fan in outer[target..].iter().rev() {
                    let above = done[fan].as_ref().and_then(|outputs| outputs.above.get(at));
                    at = *above.ok_or_else(missing)?;
                }
                let outputs = done[from].as_ref().ok_or_else(missing)?;
                outputs.values.get(at).and_then(|v| v.get(output)).cloned().ok_or_else(missing)
            }
            _ => Err(missing()),
        }
    }
}

/// Rectangles from a tensor of left, top, right, bottom; the best ones where there are too many.
fn boxes_of(
    name: &str,
    boxes: &Tensor,
    scores: Option<&Tensor>,
    score_least: f32,
    most: usize,
) -> ApiResult<Vec<Corners>> {
    let refuse =
        |why: &str| ApiError::invalid(format!("'{name}' has shape {:?}: {why}", boxes.shape()));
    let values = boxes.to_vec::<f32>().ok_or_else(|| refuse("boxes are FP32"))?;
    if boxes.shape().last() != Some(&4) {
        return Err(refuse("boxes are rows of left, top, right, bottom"));
    }
    let count = values.len() / 4;
    let scores = match scores {
        None => vec![f32::INFINITY; count],
        Some(scores) => scores.to_vec::<f32>().ok_or_else(|| refuse("scores are FP32"))?,
    };
    if scores.len() != count {
        return Err(refuse("there is not one score for each box"));
    }
    let mut order: Vec<usize> = (0..count).filter(|&index| scores[index] >= score_least).collect();
    if order.len() > most {
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        order.truncate(most);
        order.sort_unstable();
    }
    let corners = |index: usize| -> Corners {
        let [left, top, right, bottom] = std::array::from_fn(|side| values[index * 4 + side]);
        [[left, top], [right, top], [right, bottom], [left, bottom]]
    };
    Ok(order.into_iter().map(corners).collect())
}

/// The outputs of the query: values of all elements, concatenated.
fn collect_outputs(
    query: &Checked,
    done: &StageResults,
    requested: &[RequestedOutput],
) -> ApiResult<Vec<NamedTensor>> {
    let names: Vec<&String> = match requested {
        [] => query.spec.output.keys().collect(),
        some => some.iter().map(|output| &output.name).collect(),
    };
    let mut outputs = Vec::with_capacity(names.len());
    for name in names {
        let from = query.spec.output.get(name);
        let from =
            from.ok_or_else(|| ApiError::invalid(format!("the query has no output '{name}'")))?;
        let Ok(Reference::Output(stage, output)) =
            query.spec.reference(query.spec.stages.len(), from)
        else {
            return Err(ApiError::internal(format!("output '{name}' has no source")));
        };
        let elements = done[stage].as_ref().map_or(&[][..], |outputs| &outputs.values[..]);
        let own: Vec<&Tensor> = elements.iter().filter_map(|values| values.get(output)).collect();
        if own.len() < elements.len() {
            return Err(ApiError::invalid(format!("'{from}' is not among the model's outputs")));
        }
        let tensor = match own.is_empty() {
            true if output == "text" => Tensor::from_strings(vec![0], Vec::new())?,
            true => Tensor::from_vec::<f32>(vec![0], Vec::new())?,
            false => rows::join(name, &own)?,
        };
        outputs.push(NamedTensor { name: name.as_str().into(), tensor });
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_spans_count_once() {
        let span = |from: u64, to: u64| (Nanos(from), Nanos(to));
        assert_eq!(covered_time(vec![span(5, 9), span(1, 3), span(2, 4)]), Nanos(7));
        assert_eq!(covered_time(vec![span(1, 9), span(2, 3)]), Nanos(8));
    }

    #[test]
    fn groups_elements_by_layout() {
        let of = |width: usize| -> Values {
            [("x".to_string(), Tensor::from_vec(vec![1, width], vec![0f32; width]).unwrap())].into()
        };
        let inputs: Vec<Values> = [2, 3, 2, 2, 3].into_iter().map(of).collect();
        assert_eq!(compatible_groups(&inputs, 2), [vec![0, 2], vec![3], vec![1, 4]]);
    }

    #[test]
    fn keeps_the_best_boxes_in_order() {
        let boxes = Tensor::from_vec(vec![1, 3, 4], (0..12).map(|v| v as f32).collect()).unwrap();
        let scores = Tensor::from_vec(vec![3], vec![0.9f32, 0.2, 0.8]).unwrap();
        let found = boxes_of("b", &boxes, Some(&scores), 0.1, 2).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!((found[0][0], found[1][2]), ([0.0, 1.0], [10.0, 11.0]));
        assert!(boxes_of("b", &scores, None, 0.0, 9).is_err());
    }
}
